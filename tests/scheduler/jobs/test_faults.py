"""What the store does when its disk, its database or its records let it down."""

import errno
import json
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from scheduler.jobs.batches import decoded
from scheduler.jobs.database import Database
from scheduler.jobs.errors import CorruptRecord, StoreUnavailable
from scheduler.jobs.lines import NewLine
from scheduler.jobs.store import JobsConfig, JobStore
from tests.scheduler.jobs import postgres
from tests.scheduler.jobs.conftest import Clock
from tests.scheduler.jobs.helpers import as_lines, create, end, finish, now, records, start, task


@pytest.fixture
def local(tmp_path: Path) -> JobStore:
    return JobStore(JobsConfig(folder=tmp_path))


def stored(folder: Path) -> list[Path]:
    return [path for path in (folder / "storage").rglob("*") if path.is_file()]


class TestRecords:
    @pytest.mark.parametrize("damage", ["cut", "gone", "changed"])
    def test_a_damaged_result_is_drawn_again(
        self, local: JobStore, tmp_path: Path, damage: str
    ) -> None:
        batch = start(local, 3)
        claims = local.lines.claim("tiny", 3)
        for claim in claims:
            finish(local, claim)
        victim = next((tmp_path / "storage" / "lines" / batch.id).glob("2-*"))
        data = victim.read_bytes()
        match damage:
            case "cut":
                victim.write_bytes(data[:-1])
            case "changed":
                victim.write_bytes(data.replace(b"line", b"lime"))
            case "gone":
                victim.unlink()
        assert not end(local)
        assert now(local, batch).status == "in_progress"
        (again,) = local.lines.claim("tiny", 3)
        assert (again.number, again.seed) == (2, claims[1].seed)
        finish(local, again)
        assert end(local)
        batch = now(local, batch)
        found = [record["custom_id"] for record in records(local, batch.output_file_id)]
        assert found == ["line-0", "line-1", "line-2"]
        assert (batch.completed, batch.failed) == (3, 0)

    def test_after_a_cancellation_it_is_told(self, local: JobStore, tmp_path: Path) -> None:
        batch = start(local, 2)
        for claim in local.lines.claim("tiny", 2):
            finish(local, claim)
        local.batches.cancel("", batch.id)
        next((tmp_path / "storage" / "lines" / batch.id).glob("1-*")).unlink()
        assert not end(local)
        assert end(local)
        batch = now(local, batch)
        assert (batch.completed, batch.failed) == (1, 1)
        (lost,) = records(local, batch.error_file_id)
        assert lost["error"]["code"] == "result_lost"

    def test_a_damaged_row_is_named(self, local: JobStore, tmp_path: Path) -> None:
        batch = create(local, as_lines([task("a")]))
        with local._shared.database.write() as session:
            session.execute(text("update bishop_batches set labels = '{broken'"))
        with pytest.raises(CorruptRecord, match=batch.id):
            decoded(now(local, batch), "labels")


class TestDisk:
    def test_full(self, local: JobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        start(local, 1)
        (claim,) = local.lines.claim("tiny", 1)
        real = os.fsync

        def full(_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full)
        before = stored(tmp_path)
        with pytest.raises(StoreUnavailable, match="No space left"):
            finish(local, claim)
        assert stored(tmp_path) == before
        monkeypatch.setattr(os, "fsync", real)
        assert finish(local, claim)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("mount is not installed")
    if done.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def _fill(store: JobStore) -> None:
    body = json.dumps({"prompt": "a" * 30_000})
    for _ in range(100):
        create(store, as_lines([task("a")]))
        claimed = store.batches.claim_validation("tiny")
        assert claimed is not None
        store.lines.add(claimed, [NewLine(k, str(k), body, k) for k in range(10)])


class TestSmallDisk:
    def test_a_storage_that_is_full(self, small_disk: Path, tmp_path: Path) -> None:
        config = JobsConfig(folder=tmp_path, storage=str(small_disk))
        store = JobStore(config)
        start(store, 2)
        one, other = store.lines.claim("tiny", 2)
        with pytest.raises(StoreUnavailable, match="No space left"):
            store.lines.finish(one, "completed", b"x" * (2 << 20))
        assert finish(store, other)
        assert finish(store, one)
        assert end(store)
        store.close()

    def test_a_database_that_is_full(self, small_disk: Path, tmp_path: Path) -> None:
        url = f"sqlite:///{small_disk}/jobs.sqlite"
        store = JobStore(JobsConfig(folder=tmp_path, database=url))
        with pytest.raises(StoreUnavailable, match="full"):
            _fill(store)
        assert store.batches.list("", None, 5).items
        store.close()


class TestSqlite:
    def test_locked(self, tmp_path: Path) -> None:
        url = f"sqlite:///{tmp_path}/jobs.sqlite"
        database = Database(url, busy_seconds=0.1)
        other = sqlite3.connect(tmp_path / "jobs.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match="locked"), database.write():
            pass
        with database.read():
            pass
        other.execute("ROLLBACK")
        with database.write():
            pass
        other.close()
        database.close()

    def test_gone_and_back(self, local: JobStore, tmp_path: Path) -> None:
        batch = start(local, 2)
        (claim,) = local.lines.claim("tiny", 1)
        away = tmp_path / "away.sqlite"
        (tmp_path / "jobs.sqlite").rename(away)
        with pytest.raises(StoreUnavailable, match="gone"):
            finish(local, claim)
        with pytest.raises(StoreUnavailable, match="gone"):
            local.batches.get("", batch.id)
        away.rename(tmp_path / "jobs.sqlite")
        assert finish(local, claim)

    def test_replaced_by_a_copy(self, local: JobStore, tmp_path: Path) -> None:
        batch = start(local, 1)
        copy = tmp_path / "copy.sqlite"
        source = sqlite3.connect(tmp_path / "jobs.sqlite")
        target = sqlite3.connect(copy)
        source.backup(target)
        source.close()
        target.close()
        for suffix in ("-wal", "-shm"):
            (tmp_path / f"jobs.sqlite{suffix}").unlink(missing_ok=True)
        shutil.move(copy, tmp_path / "jobs.sqlite")
        assert now(local, batch).total == 1
        assert len(local.lines.claim("tiny", 1)) == 1

    def test_no_database(self, tmp_path: Path) -> None:
        (tmp_path / "jobs.sqlite").write_bytes(b"this is no database, it is a letter" * 100)
        with pytest.raises(StoreUnavailable, match="not a database"):
            JobStore(JobsConfig(folder=tmp_path))

    def test_of_another_version(self, local: JobStore, tmp_path: Path) -> None:
        with local._shared.database.write() as session:
            session.execute(text("update bishop_schema set version = 99"))
        with pytest.raises(ValueError, match="99"):
            JobStore(JobsConfig(folder=tmp_path))


class TestPostgres:
    def test_a_restart_of_the_server_is_survived(
        self, postgres_server: postgres.Server, tmp_path: Path, clock: Clock
    ) -> None:
        config = JobsConfig(folder=tmp_path, database=postgres_server.url)
        store = JobStore(config)
        batch = start(store, 1, prefix=tmp_path.name)
        (claim,) = [c for c in store.lines.claim("tiny", 99) if c.batch.seq == batch.seq]
        postgres_server.stop()
        try:
            with pytest.raises(StoreUnavailable, match="job database"):
                finish(store, claim)
        finally:
            postgres_server.start()
        assert finish(store, claim)
        store.close()
