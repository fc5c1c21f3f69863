"""Batches from creation to their end: every change of status is one transaction here.

validating -> in_progress -> finalizing -> completed (or expired); validating -> failed;
validating or in_progress -> cancelling -> cancelled.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, delete, exists, func, select, update
from sqlalchemy.orm import Session

from scheduler.jobs.errors import CorruptRecord, JobError, LeaseLost
from scheduler.jobs.files import Files
from scheduler.jobs.shared import Page, Shared, new_id
from scheduler.jobs.tables import Batch, File, Line

ENDED: Final = ("completed", "failed", "expired", "cancelled")
PURPOSE: Final = "batch"

NEVER_RAN: Final = {
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request ran."),
    "expired": (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    "lost": ("result_lost", "The stored result was damaged and the batch had already ended."),
}
"""Codes and messages of lines without a response, as they stand in the error file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBatch:
    """What a client asks for. defaults: what lines get that do not say it."""

    tenant: str
    model: str
    endpoint: str
    completion_window: str
    window_seconds: int
    input_file_id: str
    output_seconds: int
    defaults: Mapping[str, Any]
    labels: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class LineError:
    """Why an input file is refused. line: counted from 1; None if it is about the whole file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Batches:
    def __init__(self, shared: Shared, files: Files) -> None:
        self._shared = shared
        self._files = files

    # -- for clients -------------------------------------------------------------------------

    def create(self, new: NewBatch) -> Batch:
        """Raises JobError if the input file is not there."""
        file = self._files.get(new.tenant, new.input_file_id)
        if file is None:
            raise JobError("there is no file with this id", "input_file_id", "file_not_found")
        if file.purpose != PURPOSE:
            raise JobError("the file's purpose must be 'batch'", "input_file_id")
        now = self._shared.now()
        batch = Batch(
            id=new_id("batch_"),
            tenant=new.tenant,
            model=new.model,
            endpoint=new.endpoint,
            completion_window=new.completion_window,
            input_file_id=new.input_file_id,
            status="validating",
            defaults=json.dumps(dict(new.defaults)),
            labels=None if new.labels is None else json.dumps(dict(new.labels)),
            output_seconds=new.output_seconds,
            total=0,
            completed=0,
            failed=0,
            created_at=now,
            expires_at=now + new.window_seconds,
        )
        with self._shared.database.write() as session:
            session.add(batch)
        return batch

    def get(self, tenant: str, id: str) -> Batch | None:
        with self._shared.database.read() as session:
            return session.scalar(select(Batch).where(Batch.tenant == tenant, Batch.id == id))

    def list(self, tenant: str, after: str | None, limit: int) -> Page[Batch]:
        """The newest first, after the one named. Raises JobError if there is no such batch."""
        query = select(Batch).where(Batch.tenant == tenant)
        with self._shared.database.read() as session:
            if after is not None:
                mine = (Batch.tenant == tenant, Batch.id == after)
                seq = session.scalar(select(Batch.seq).where(*mine))
                if seq is None:
                    raise JobError("there is no batch with this id to list after", "after")
                query = query.where(Batch.seq < seq)
            found = list(session.scalars(query.order_by(Batch.seq.desc()).limit(limit + 1)))
        return Page(found[:limit], len(found) > limit)

    def cancel(self, tenant: str, id: str) -> Batch | None:
        """Stop what has not run. None if there is no such batch; JobError if it has ended."""
        with self._shared.database.write() as session:
            mine = (Batch.tenant == tenant, Batch.id == id)
            batch = session.scalar(select(Batch).where(*mine).with_for_update())
            if batch is None:
                return None
            if batch.status in ENDED or batch.status == "finalizing":
                message = f"this batch can no longer be cancelled: it is {batch.status}"
                raise JobError(message, code="batch_not_cancellable")
            if batch.status != "cancelling":
                batch.status, batch.ending, batch.worker = "cancelling", "cancelled", None
                batch.cancelling_at = self._now(batch)
            return batch

    def unfinished(self, tenant: str) -> int:
        """Batches of a tenant that have not ended."""
        query = select(func.count()).where(Batch.tenant == tenant, Batch.status.not_in(ENDED))
        with self._shared.database.read() as session:
            return session.scalar(query) or 0

    def by_status(self) -> dict[str, int]:
        query = select(Batch.status, func.count()).group_by(Batch.status)
        with self._shared.database.read() as session:
            return dict(session.execute(query).all())

    # -- validation --------------------------------------------------------------------------

    def claim_validation(self, model: str) -> Batch | None:
        """A batch to validate; what an earlier attempt left is removed."""
        waiting = (Batch.status == "validating", Batch.model == model, Batch.worker.is_(None))
        with self._shared.database.write() as session:
            batch = self._first(session, *waiting)
            if batch is not None:
                batch.worker = self._shared.worker
                session.execute(delete(Line).where(Line.batch == batch.seq))
            return batch

    def validated(self, batch: Batch, total: int) -> None:
        """Let the lines run. Raises LeaseLost."""
        with self._shared.database.write() as session:
            mine = self.hold(session, batch, "validating")
            mine.status, mine.total, mine.worker = "in_progress", total, None
            mine.in_progress_at = self._now(mine)

    def refuse(self, batch: Batch, errors: Sequence[LineError]) -> None:
        """The input file is not usable: none of its lines runs. Raises LeaseLost."""
        told = [
            {"code": e.code, "line": e.line, "message": e.message, "param": e.param} for e in errors
        ]
        with self._shared.database.write() as session:
            mine = self.hold(session, batch, "validating")
            session.execute(delete(Line).where(Line.batch == batch.seq))
            mine.status, mine.errors, mine.worker = "failed", json.dumps(told), None
            mine.failed_at = self._now(mine)

    # -- the end -----------------------------------------------------------------------------

    def expire(self) -> None:
        """Decide the end of batches whose window is over."""
        late = (Batch.expires_at <= self._shared.now(), Batch.ending.is_(None))
        running = Batch.status.in_(("validating", "in_progress"))
        with self._shared.database.write() as session:
            ended = update(Batch).where(*late, running)
            session.execute(ended.values(ending="expired", worker=None, status="in_progress"))

    def claim_ending(self, model: str) -> Batch | None:
        """A batch whose lines have all ended, to finalize. Lines that shall not run end here."""
        running = exists().where(Line.batch == Batch.seq, Line.state == "running")
        over = (Batch.completed + Batch.failed == Batch.total) | Batch.ending.is_not(None)
        ready = Batch.status.in_(("in_progress", "cancelling")) & over & ~running
        free = (Batch.worker.is_(None), Batch.model == model)
        with self._shared.database.write() as session:
            batch = self._first(session, *free, ready | (Batch.status == "finalizing"))
            if batch is not None:
                self._start_ending(session, batch)
            return batch

    def _start_ending(self, session: Session, batch: Batch) -> None:
        batch.worker = self._shared.worker
        if batch.status != "cancelling":
            batch.status, batch.finalizing_at = "finalizing", self._now(batch)
        if batch.ending is None:
            return
        if batch.in_progress_at is None:  # what there is was never validated
            session.execute(delete(Line).where(Line.batch == batch.seq))
        pending = (Line.batch == batch.seq, Line.state == "pending")
        ended = update(Line).where(*pending)
        never = session.execute(
            ended.values(state="done", outcome="failed", code=NEVER_RAN[batch.ending][0])
        )
        batch.failed += never.rowcount  # type: ignore[attr-defined]

    def ended(self, batch: Batch, output: File | None, errors: File | None) -> None:
        """The result files (id and bytes) are written: show them and end. Raises LeaseLost."""
        with self._shared.database.write() as session:
            mine = self.hold(session, batch, "finalizing", "cancelling")
            for file in (output, errors):
                if file is not None:
                    self._files.show(session, file.id, file.bytes)
            mine.output_file_id = None if output is None else output.id
            mine.error_file_id = None if errors is None else errors.id
            mine.worker, mine.status = None, mine.ending or "completed"
            setattr(mine, f"{mine.status}_at", self._now(mine))

    def reopen(self, batch: Batch) -> None:
        """A result was damaged and its line runs again: back to work. Raises LeaseLost."""
        with self._shared.database.write() as session:
            mine = self.hold(session, batch, "finalizing", "cancelling")
            mine.worker = None
            if mine.ending is None:
                mine.status, mine.finalizing_at = "in_progress", None

    def release(self, batch: Batch) -> None:
        """Leave a batch to whoever comes next."""
        with self._shared.database.write() as session:
            mine = (Batch.seq == batch.seq, Batch.worker == self._shared.worker)
            session.execute(update(Batch).where(*mine).values(worker=None))

    def sweep(self) -> None:
        """Remove the lines of batches that have ended; their files hold all of it."""
        has_lines = exists().where(Line.batch == Batch.seq)
        query = select(Batch.seq, Batch.id).where(Batch.status.in_(ENDED), has_lines).limit(10)
        with self._shared.database.read() as session:
            ended = session.execute(query).all()
        for seq, id in ended:
            self._shared.storage.delete_under(f"lines/{id}")
            with self._shared.database.write() as session:
                session.execute(delete(Line).where(Line.batch == seq))

    # -- within a transaction ----------------------------------------------------------------

    def hold(self, session: Session, batch: Batch, *status: str) -> Batch:
        """The batch as it is now, locked. Raises LeaseLost if it is not this server's any more."""
        query = select(Batch).where(Batch.seq == batch.seq).with_for_update()
        now = session.scalar(query)
        if now is None or now.worker != self._shared.worker or now.status not in status:
            raise LeaseLost(f"batch {batch.id} is no longer {' or '.join(status)} here")
        return now

    def _first(self, session: Session, *where: ColumnElement[bool]) -> Batch | None:
        query = select(Batch).where(*where).order_by(Batch.seq).limit(1)
        return session.scalar(query.with_for_update(skip_locked=True))

    def _now(self, batch: Batch) -> int:
        """Not before what has happened to the batch already, whatever the clock says."""
        return max(self._shared.now(), batch.created_at, batch.in_progress_at or 0)


def decoded(batch: Batch, column: str) -> Any:
    """The JSON in a column, None if there is none. Raises CorruptRecord."""
    text = getattr(batch, column)
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        raise CorruptRecord(f"batch {batch.id}: its {column} are damaged") from None
