"""The life of batches in the store, on SQLite and on PostgreSQL."""

import threading
from pathlib import Path

import pytest

from scheduler.jobs.errors import JobError, LeaseLost
from scheduler.jobs.store import JobsConfig, JobStore
from tests.scheduler.jobs.conftest import Clock, Open
from tests.scheduler.jobs.helpers import (
    as_lines,
    create,
    end,
    finish,
    now,
    records,
    start,
    task,
    upload,
)


class TestLife:
    def test_every_line_ends_in_one_file(self, store: JobStore) -> None:
        batch = start(store, 7)
        assert (batch.status, batch.total) == ("in_progress", 7)
        claims = store.lines.claim("tiny", 100)
        for claim in claims:
            assert finish(store, claim, "failed" if claim.number == 3 else "completed")
        assert end(store)
        batch = now(store, batch)
        assert (batch.status, batch.completed, batch.failed) == ("completed", 6, 1)
        output, errors = (records(store, id) for id in (batch.output_file_id, batch.error_file_id))
        assert [r["custom_id"] for r in output] == [f"line-{k}" for k in (0, 1, 3, 4, 5, 6)]
        assert [r["custom_id"] for r in errors] == ["line-2"]
        assert batch.completed_at is not None and batch.finalizing_at is not None
        shown = store.files.list("", "batch_output", None, 10, "asc").items
        assert [file.filename for file in shown] == [
            f"{batch.id}_output.jsonl",
            f"{batch.id}_error.jsonl",
        ]
        content = b"".join(store.content(shown[0].id))
        assert shown[0].bytes == len(content)

    def test_a_file_without_lines_of_its_kind_does_not_exist(self, store: JobStore) -> None:
        batch = start(store, 1)
        finish(store, store.lines.claim("tiny", 1)[0], "failed")
        assert end(store)
        batch = now(store, batch)
        assert batch.output_file_id is None
        assert batch.error_file_id is not None

    def test_seeds_are_fixed_once_and_given_ones_are_kept(self, store: JobStore) -> None:
        given = task("a", body={"prompt": "a", "seed": 5})
        create(store, as_lines([given, task("b")]))
        claimed = store.batches.claim_validation("tiny")
        assert claimed is not None
        assert store.validate(claimed)
        first = store.lines.claim("tiny", 10)
        for claim in first:
            store.lines.release(claim)
        again = store.lines.claim("tiny", 10)
        assert [claim.seed for claim in first] == [claim.seed for claim in again]
        assert '"seed": 5' in first[0].body

    def test_nothing_stays_behind(self, store: JobStore, tmp_path: Path) -> None:
        batch = start(store, 3)
        for claim in store.lines.claim("tiny", 3):
            finish(store, claim)
        assert end(store)
        store.keep()
        batch = now(store, batch)
        kept = {path.name for path in (tmp_path / "storage").rglob("*") if path.is_file()}
        assert kept == {batch.input_file_id, batch.output_file_id}
        assert store.lines.claim("tiny", 3) == []

    def test_small_batches_are_not_kept_waiting(self, store: JobStore) -> None:
        start(store, 50, "large")
        start(store, 2, "small")
        names = [claim.custom_id for claim in store.lines.claim("tiny", 4)]
        assert sorted(names) == ["large-0", "large-1", "small-0", "small-1"]

    def test_a_server_leaves_batches_of_other_models_alone(self, store: JobStore) -> None:
        start(store, 2)
        assert store.lines.claim("mini", 10) == []
        assert store.batches.claim_validation("mini") is None
        assert store.batches.claim_ending("mini") is None


class TestCancel:
    def test_partial_results_are_kept_and_the_rest_says_why(self, store: JobStore) -> None:
        batch = start(store, 5)
        first, second = store.lines.claim("tiny", 2)
        finish(store, first)
        cancelled = store.batches.cancel("", batch.id)
        assert cancelled is not None and cancelled.status == "cancelling"
        assert store.lines.claim("tiny", 5) == []
        assert store.lines.stopped([batch.seq]) == {batch.seq}
        assert not end(store)  # a line still runs
        finish(store, second)
        assert end(store)
        batch = now(store, batch)
        assert (batch.status, batch.completed, batch.failed) == ("cancelled", 2, 3)
        assert len(records(store, batch.output_file_id)) == 2
        codes = [record["error"]["code"] for record in records(store, batch.error_file_id)]
        assert codes == ["batch_cancelled"] * 3

    def test_while_it_is_validated(self, store: JobStore) -> None:
        batch = create(store, as_lines([task("a")]))
        claimed = store.batches.claim_validation("tiny")
        assert claimed is not None
        store.batches.cancel("", batch.id)
        with pytest.raises(LeaseLost):
            store.validate(claimed)
        assert end(store)
        batch = now(store, batch)
        assert (batch.status, batch.total, batch.error_file_id) == ("cancelled", 0, None)

    def test_what_has_ended_cannot_be_cancelled(self, store: JobStore) -> None:
        batch = start(store, 1)
        finish(store, store.lines.claim("tiny", 1)[0])
        assert end(store)
        with pytest.raises(JobError, match="completed"):
            store.batches.cancel("", batch.id)
        assert store.batches.cancel("", "batch_unknown") is None


class TestExpiry:
    def test_a_batch_past_its_window_keeps_what_it_has(self, store: JobStore, clock: Clock) -> None:
        batch = start(store, 3)
        finish(store, store.lines.claim("tiny", 1)[0])
        clock.pass_by(86_401)
        store.workers.beat()
        store.keep()
        assert store.lines.claim("tiny", 3) == []
        assert end(store)
        batch = now(store, batch)
        assert (batch.status, batch.completed, batch.failed) == ("expired", 1, 2)
        codes = {record["error"]["code"] for record in records(store, batch.error_file_id)}
        assert codes == {"batch_expired"}
        assert batch.expired_at is not None

    def test_files_expire(self, store: JobStore, clock: Clock, tmp_path: Path) -> None:
        file = store.files.begin("", "batch", "a", 3600)
        with store.writer(file.id) as writer:
            writer.commit()
        store.files.ready(file.id, 0, "a", 3600)
        clock.pass_by(3599)
        assert store.files.get("", file.id) is not None
        clock.pass_by(1)
        assert store.files.get("", file.id) is None
        assert store.files.sweep() == 1
        assert not list((tmp_path / "storage" / "files").iterdir())

    def test_a_clock_that_steps_back_breaks_nothing(self, store: JobStore, clock: Clock) -> None:
        batch = start(store, 2)
        clock.step(-7200)
        for claim in store.lines.claim("tiny", 2):
            assert finish(store, claim)
        store.keep()
        assert end(store)
        batch = now(store, batch)
        assert batch.status == "completed"
        times = (batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at)
        assert list(times) == sorted(times)  # type: ignore[type-var]


class TestLeases:
    def test_a_silent_server_is_taken_over(self, open_store: Open, clock: Clock) -> None:
        dead, alive = open_store(), open_store()
        batch = start(dead, 4)
        held = dead.lines.claim("tiny", 2)
        finish(dead, held[0])
        alive.keep()
        assert len(alive.lines.claim("tiny", 10)) == 2
        clock.pass_by(9)
        alive.keep()
        assert alive.lines.claim("tiny", 10) == []
        clock.pass_by(1)
        alive.keep()
        taken = alive.lines.claim("tiny", 10)
        assert [(c.number, c.seed) for c in taken] == [(held[1].number, held[1].seed)]
        assert not finish(dead, held[1])  # it was only slow, and comes too late
        assert finish(alive, taken[0])
        assert not finish(alive, taken[0])
        assert now(alive, batch).completed == 2

    def test_a_living_server_keeps_its_lines(self, open_store: Open, clock: Clock) -> None:
        one, other = open_store(), open_store()
        start(one, 2)
        held = one.lines.claim("tiny", 2)
        for _ in range(5):
            clock.pass_by(6)
            one.workers.beat()
            other.keep()
        assert other.lines.claim("tiny", 2) == []
        assert finish(one, held[0])

    def test_no_step_of_the_clock_takes_anything_over(self, open_store: Open, clock: Clock) -> None:
        one, other = open_store(), open_store()
        start(one, 1)
        held = one.lines.claim("tiny", 1)
        for step in (100_000_000, -200_000_000):
            clock.step(step / 10_000)
            other.workers.take_over()
        assert finish(one, held[0])

    def test_a_server_that_leaves_hands_over_at_once(self, open_store: Open) -> None:
        one, other = open_store(), open_store()
        start(one, 3)
        one.lines.claim("tiny", 3)
        one.close()
        assert len(other.lines.claim("tiny", 3)) == 3

    def test_one_that_died_before_its_first_beat(
        self, open_store: Open, clock: Clock, database: str, tmp_path: Path
    ) -> None:
        alive = open_store()
        start(alive, 2)
        dead = JobStore(JobsConfig(folder=tmp_path, database=database))
        assert len(dead.lines.claim("tiny", 2)) == 2
        dead.files.begin("", "batch", "half", None)
        alive.workers.take_over()
        clock.pass_by(9)
        assert alive.workers.take_over() == []
        clock.pass_by(1)
        assert alive.workers.take_over() == [dead.worker]
        assert len(alive.lines.claim("tiny", 2)) == 2
        assert alive.files.sweep() == 1
        dead.close()

    def test_a_server_that_leaves_finalizes_no_further(self, open_store: Open) -> None:
        one, other = open_store(), open_store()
        batch = start(one, 2)
        for claim in one.lines.claim("tiny", 2):
            finish(one, claim)
        ending = one.batches.claim_ending("tiny")
        assert ending is not None
        one.close()
        with pytest.raises(LeaseLost):
            one.results.assemble(ending)
        assert end(other)
        assert now(other, batch).status == "completed"

    def test_validation_and_finalizing_start_again(self, open_store: Open, clock: Clock) -> None:
        dead, alive = open_store(), open_store()
        batch = create(dead, as_lines([task("a"), task("b")]))
        claimed = dead.batches.claim_validation("tiny")
        assert claimed is not None
        assert alive.batches.claim_validation("tiny") is None
        _take_over(alive, clock)
        second = alive.batches.claim_validation("tiny")
        assert second is not None
        assert alive.validate(second)
        with pytest.raises(LeaseLost):
            dead.validate(claimed)
        for claim in alive.lines.claim("tiny", 2):
            finish(alive, claim)
        dead.workers.beat()
        ending = dead.batches.claim_ending("tiny")
        assert ending is not None
        _take_over(alive, clock)
        assert end(alive)
        with pytest.raises(LeaseLost):
            dead.results.assemble(ending)
        batch = now(alive, batch)
        assert len(records(alive, batch.output_file_id)) == 2
        assert len(alive.files.list("", "batch_output", None, 10, "asc").items) == 1

    def test_servers_that_race_share_the_lines(self, open_store: Open) -> None:
        stores = [open_store() for _ in range(3)]
        batch = start(stores[0], 60)
        ran: list[int] = []

        def work(store: JobStore) -> None:
            while claims := store.lines.claim("tiny", 4):
                for claim in claims:
                    assert finish(store, claim)
                    ran.append(claim.number)

        threads = [threading.Thread(target=work, args=(store,)) for store in stores]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(ran) == list(range(1, 61))
        assert sum(end(store) for store in stores) == 1
        batch = now(stores[0], batch)
        assert len(records(stores[0], batch.output_file_id)) == batch.completed == 60


def _take_over(store: JobStore, clock: Clock) -> None:
    store.workers.take_over()
    clock.pass_by(11)
    store.workers.take_over()


class TestTenants:
    def test_each_sees_its_own(self, store: JobStore) -> None:
        file = upload(store, b"x", "alice")
        batch = create(store, as_lines([task("a")]), "alice")
        assert store.files.get("alice", file.id) is not None
        assert store.files.get("bob", file.id) is None
        assert not store.files.delete("bob", file.id)
        assert store.batches.get("bob", batch.id) is None
        assert store.batches.cancel("bob", batch.id) is None
        assert not store.files.list("bob", None, None, 10, "desc").items
        assert not store.batches.list("bob", None, 10).items
        with pytest.raises(JobError):
            store.files.list("bob", None, file.id, 10, "desc")
        assert store.batches.unfinished("alice") == 1
        assert store.batches.unfinished("bob") == 0


class TestPaging:
    def test_files(self, store: JobStore) -> None:
        ids = [upload(store, b"x").id for _ in range(5)]
        first = store.files.list("", None, None, 2, "desc")
        assert [file.id for file in first.items] == ids[:2:-1]
        assert first.more
        rest = store.files.list("", "batch", first.items[-1].id, 10, "desc")
        assert [file.id for file in rest.items] == ids[2::-1]
        assert not rest.more
        assert [file.id for file in store.files.list("", None, ids[1], 2, "asc").items] == ids[2:4]

    def test_batches(self, store: JobStore) -> None:
        ids = [create(store, b"x").id for _ in range(3)]
        page = store.batches.list("", None, 2)
        assert ([batch.id for batch in page.items], page.more) == (ids[:0:-1], True)
        page = store.batches.list("", ids[1], 2)
        assert ([batch.id for batch in page.items], page.more) == (ids[:1], False)
        with pytest.raises(JobError):
            store.batches.list("", "batch_unknown", 2)


class TestConfig:
    @pytest.mark.parametrize("url", ["mysql://x/y", "nonsense", "sqlite://", "oracle://a/b"])
    def test_other_databases_are_refused(self, url: str, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="postgresql"):
            JobStore(JobsConfig(folder=tmp_path, database=url))

    def test_unknown_storage_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="carrier-pigeon"):
            JobStore(JobsConfig(folder=tmp_path, storage="carrier-pigeon://loft"))

    def test_an_object_store_works_too(self, tmp_path: Path) -> None:
        store = JobStore(JobsConfig(folder=tmp_path, storage="memory://bucket/jobs"))
        batch = start(store, 2)
        for claim in store.lines.claim("tiny", 2):
            finish(store, claim)
        assert end(store)
        store.batches.sweep()
        assert len(records(store, now(store, batch).output_file_id)) == 2
        assert not (tmp_path / "storage").exists()
        store.close()
