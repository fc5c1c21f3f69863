"""A job store on every database there is, with clocks that tests can turn."""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from scheduler.jobs.database import parse_url
from scheduler.jobs.store import JobsConfig, JobStore
from scheduler.jobs.tables import Base
from tests.scheduler.jobs import postgres


@dataclass
class Clock:
    """A wall clock and a monotonic one; a step moves the wall clock alone."""

    wall: float = 1_800_000_000.0
    running: float = 0.0

    def step(self, seconds: float) -> None:
        self.wall += seconds

    def pass_by(self, seconds: float) -> None:
        self.wall += seconds
        self.running += seconds


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[postgres.Server]:
    if (reason := postgres.why_not()) is not None:
        pytest.skip(reason)
    with tempfile.TemporaryDirectory() as folder, postgres.running(Path(folder)) as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/jobs.sqlite"
        return
    url = request.getfixturevalue("postgres_server").url
    engine = create_engine(parse_url(url))
    Base.metadata.drop_all(engine)
    engine.dispose()
    yield url


@pytest.fixture
def clock() -> Clock:
    return Clock()


Open = Callable[[], JobStore]


@pytest.fixture
def open_store(database: str, tmp_path: Path, clock: Clock) -> Iterator[Open]:
    """Opens one more server's store on the same database and storage."""
    opened: list[JobStore] = []

    def open() -> JobStore:
        config = JobsConfig(folder=tmp_path, database=database, lease_seconds=10)
        store = JobStore(config, lambda: clock.wall, lambda: clock.running)
        store.workers.beat()
        opened.append(store)
        return store

    yield open
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: Open) -> JobStore:
    return open_store()
