"""Batches on the real engine: interactive requests go first, and no picture changes for it."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from engine.config import EngineConfig
from engine.service import EngineService
from scheduler.jobs.store import JobsConfig
from serving.config import ServerConfig
from tests.fakes import wait_until
from tests.live import serving
from tests.serving.jobs import records, submit, tasks, until
from tests.test_server import draw


@pytest.fixture
def engine() -> EngineService:
    return EngineService(EngineConfig(model="tiny", max_images=2, threads=1))


@pytest.fixture
def http(engine: EngineService, tmp_path: Path) -> Iterator[httpx.Client]:
    config = ServerConfig(jobs=JobsConfig(folder=tmp_path), poll_seconds=0.05, batch_lines=6)
    with serving(engine, config) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def test_interactive_pictures_park_those_of_batches(
    http: httpx.Client, engine: EngineService
) -> None:
    id = submit(http, tasks(12))["id"]
    assert wait_until(lambda: engine.stats().images_running == 2)
    crowded = [draw(http, seed=seed).json()["data"] for seed in range(4)]
    assert http.get(f"/v1/batches/{id}").json()["status"] == "in_progress"
    assert engine.stats().images_parked > 0
    batch = until(http, id, seconds=60)
    assert batch["request_counts"] == {"total": 12, "completed": 12, "failed": 0}
    assert [draw(http, seed=seed).json()["data"] for seed in range(4)] == crowded
    for record in records(http, batch["output_file_id"]).values():
        (picture,) = record["response"]["body"]["data"]
        number = record["custom_id"].removeprefix("line-")
        body = {"prompt": f"picture {number}", "seed": picture["seed"]}
        assert draw(http, **body).json()["data"] == [picture]
