"""Who is alive. A lease lasts as long as its holder's beat moves.

Whether it moves is judged by the observer's own monotonic clock, so that no step of a wall clock
can make a server look dead or alive.
"""

import time
from collections.abc import Callable, Mapping

from sqlalchemy import Select, delete, select, update
from sqlalchemy.orm import Session

from scheduler.jobs.shared import Shared
from scheduler.jobs.tables import Batch, File, Line, Worker

NEVER = -1
"""The beat of a server that has none in the table."""


class Workers:
    """lease_seconds: silence after which another server's work is taken over."""

    def __init__(
        self,
        shared: Shared,
        lease_seconds: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shared = shared
        self.lease_seconds = lease_seconds
        self._monotonic = monotonic
        self._seen: dict[str, tuple[int, float]] = {}

    def beat(self) -> None:
        """Say that this server lives. To be called several times per lease."""
        worker = self._shared.worker
        with self._shared.database.write() as session:
            moved = update(Worker).where(Worker.id == worker).values(beat=Worker.beat + 1)
            if not session.execute(moved).rowcount:  # type: ignore[attr-defined]
                session.add(Worker(id=worker, beat=1))

    def take_over(self) -> list[str]:
        """Free what silent servers hold; returns their ids."""
        with self._shared.database.read() as session:
            beats = dict.fromkeys(_holders(session), NEVER)
            beats |= dict(session.execute(select(Worker.id, Worker.beat)).all())
        silent = self._observe(beats)
        return [worker for worker in silent if self._bury(worker, beats[worker])]

    def leave(self) -> None:
        """Free what this server holds; it does no more work."""
        with self._shared.database.write() as session:
            _free(session, self._shared.worker)
            session.execute(delete(Worker).where(Worker.id == self._shared.worker))

    def _observe(self, beats: Mapping[str, int]) -> list[str]:
        now = self._monotonic()
        self._seen = {
            worker: self._seen[worker]
            if self._seen.get(worker, (None,))[0] == beat
            else (beat, now)
            for worker, beat in beats.items()
        }
        return [
            worker
            for worker, (_, since) in self._seen.items()
            if worker != self._shared.worker and now - since >= self.lease_seconds
        ]

    def _bury(self, worker: str, beat: int) -> bool:
        with self._shared.database.write() as session:
            now = session.scalar(select(Worker.beat).where(Worker.id == worker).with_for_update())
            if beat != (NEVER if now is None else now):
                return False
            session.execute(delete(Worker).where(Worker.id == worker))
            _free(session, worker)
        return True


def _holders(session: Session) -> set[str]:
    """Whoever holds something: a server may die between its first claim and its first beat."""
    held: tuple[Select[str | None], ...] = (
        select(Line.worker).where(Line.worker.is_not(None)).distinct(),
        select(Batch.worker).where(Batch.worker.is_not(None)).distinct(),
        select(File.worker).where(File.worker.is_not(None)).distinct(),
    )
    return {worker for query in held for worker in session.scalars(query) if worker is not None}


def _free(session: Session, worker: str) -> None:
    """What `worker` held: lines run again, batches find another, half-written files go."""
    batch = update(Batch).where(Batch.worker == worker).values(worker=None)
    line = update(Line).where(Line.worker == worker, Line.state == "running")
    file = update(File).where(File.worker == worker, File.state == "writing")
    session.execute(batch)
    session.execute(line.values(state="pending", worker=None, token=None))
    session.execute(file.values(state="deleted", worker=None))
