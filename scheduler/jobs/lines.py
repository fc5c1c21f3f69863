"""The lines of batches: handed out under leases, each ended exactly once."""

import hashlib
import json
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import func, insert, select, update
from sqlalchemy.orm import Session

from scheduler.jobs.batches import NEVER_RAN, Batches
from scheduler.jobs.errors import LeaseLost
from scheduler.jobs.shared import Shared, new_id, record_key
from scheduler.jobs.tables import Batch, Line

Outcome = Literal["completed", "failed"]

PAGE = 256


@dataclass(frozen=True, slots=True)
class NewLine:
    number: int
    custom_id: str
    body: str
    seed: int


@dataclass(frozen=True, slots=True)
class Claim:
    """A line that this server may run, and that nobody else can end while `token` is its own."""

    batch: Batch
    number: int
    custom_id: str
    body: str
    seed: int
    token: str


class Lines:
    def __init__(self, shared: Shared, batches: Batches) -> None:
        self._shared = shared
        self._batches = batches

    def add(self, batch: Batch, lines: Sequence[NewLine]) -> None:
        """Store lines of a batch that this server validates. Raises LeaseLost."""
        rows = [
            {
                "batch": batch.seq,
                "number": line.number,
                "custom_id": line.custom_id,
                "body": line.body,
                "seed": line.seed,
                "state": "pending",
            }
            for line in lines
        ]
        with self._shared.database.write() as session:
            self._batches.hold(session, batch, "validating")
            session.execute(insert(Line), rows)

    def claim(self, model: str, limit: int) -> list[Claim]:
        """Up to `limit` lines to run, spread evenly over the batches, each in the order of its
        file: a batch of a thousand lines does not keep one of ten waiting."""
        with self._shared.database.write() as session:
            batches = self._open_batches(session, model)
            if not batches or limit < 1:
                return []
            chosen = self._choose(session, batches, limit)
            return [self._lease(batches[line.batch], line) for line in chosen]

    def _open_batches(self, session: Session, model: str) -> dict[int, Batch]:
        open = (Batch.status == "in_progress", Batch.model == model, Batch.ending.is_(None))
        left = Batch.completed + Batch.failed < Batch.total
        query = select(Batch).where(*open, left).order_by(Batch.seq).with_for_update()
        return {batch.seq: batch for batch in session.scalars(query)}

    def _choose(self, session: Session, batches: dict[int, Batch], limit: int) -> list[Line]:
        running = Counter(self._running(session, list(batches)))
        queues: dict[int, list[Line]] = defaultdict(list)
        for seq in batches:
            pending = select(Line).where(Line.batch == seq, Line.state == "pending")
            queues[seq] = list(session.scalars(pending.order_by(Line.number).limit(limit)))[::-1]
        chosen: list[Line] = []
        while len(chosen) < limit and any(queues.values()):
            seq = min((seq for seq in queues if queues[seq]), key=lambda seq: running[seq])
            running[seq] += 1
            chosen.append(queues[seq].pop())
        return chosen

    def _running(self, session: Session, batches: list[int]) -> dict[int, int]:
        of_these = (Line.batch.in_(batches), Line.state == "running")
        query = select(Line.batch, func.count()).where(*of_these).group_by(Line.batch)
        return dict(session.execute(query).all())

    def _lease(self, batch: Batch, line: Line) -> Claim:
        token = uuid.uuid4().hex
        line.state, line.worker, line.token = "running", self._shared.worker, token
        return Claim(batch, line.number, line.custom_id, line.body, line.seed, token)

    def finish(self, claim: Claim, outcome: Outcome, record: bytes) -> bool:
        """End a line with its record (one line of JSON, without the break).

        The record is stored first; then one transaction makes it the line's own. False if the
        line is not this server's any more: then nothing of this attempt stays.
        """
        key = record_key(claim.batch.id, claim.number, claim.token)
        self._shared.storage.put(key, record)
        with self._shared.database.write() as session:
            kept = self._keep(session, claim, outcome, record)
        if not kept:
            self._shared.storage.delete(key)
        return kept

    def _keep(self, session: Session, claim: Claim, outcome: Outcome, record: bytes) -> bool:
        # The batch first, everywhere: two orders of locking would deadlock on PostgreSQL.
        lock = select(Batch).where(Batch.seq == claim.batch.seq).with_for_update()
        batch = session.scalar(lock)
        ended = _mine(claim).values(
            state="done",
            worker=None,
            outcome=outcome,
            bytes=len(record),
            digest=digest(record),
        )
        if batch is None or not session.execute(ended).rowcount:  # type: ignore[attr-defined]
            return False
        setattr(batch, outcome, getattr(batch, outcome) + 1)
        return True

    def release(self, claim: Claim) -> None:
        """Give a line back; it will run again from its seed."""
        with self._shared.database.write() as session:
            session.execute(_mine(claim).values(state="pending", worker=None, token=None))

    def stopped(self, batches: Sequence[int]) -> set[int]:
        """Which of these batches shall run no more lines."""
        with self._shared.database.read() as session:
            of_these = (Batch.seq.in_(batches), Batch.ending.is_not(None))
            return set(session.scalars(select(Batch.seq).where(*of_these)))

    # -- for result files --------------------------------------------------------------------

    def records(self, batch: Batch) -> Iterator[tuple[Line, bytes | None]]:
        """Every line in order with its record; None if it was stored and is damaged or gone.

        Raises LeaseLost when this server leaves."""
        last = 0
        while page := self._page(batch, last):
            if self._shared.closing.is_set():
                raise LeaseLost("this server is leaving")
            for line in page:
                yield line, self._record(batch, line)
            last = page[-1].number

    def redo(self, batch: Batch, line: Line) -> None:
        """Let a line run again whose record is damaged; if its batch has ended, say so instead."""
        with self._shared.database.write() as session:
            mine = self._batches.hold(session, batch, "finalizing", "cancelling")
            setattr(mine, str(line.outcome), getattr(mine, str(line.outcome)) - 1)
            again = update(Line).where(Line.batch == batch.seq, Line.number == line.number)
            values: dict[str, Any] = {"token": None, "bytes": None, "digest": None}
            if mine.ending is None:
                values |= {"state": "pending", "outcome": None}
            else:
                values |= {"outcome": "failed", "code": NEVER_RAN["lost"][0]}
                mine.failed += 1
            session.execute(again.values(**values))

    def _page(self, batch: Batch, after: int) -> list[Line]:
        query = select(Line).where(Line.batch == batch.seq, Line.number > after)
        with self._shared.database.read() as session:
            return list(session.scalars(query.order_by(Line.number).limit(PAGE)))

    def _record(self, batch: Batch, line: Line) -> bytes | None:
        if line.token is None:
            return never_ran(line)
        data = self._shared.storage.get(record_key(batch.id, line.number, line.token))
        whole = data is not None and len(data) == line.bytes and digest(data) == line.digest
        return data if whole else None


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def never_ran(line: Line) -> bytes:
    """The record of a line without a response."""
    messages = dict(NEVER_RAN.values())
    code = line.code or NEVER_RAN["lost"][0]
    record = {
        "id": new_id("batch_req_"),
        "custom_id": line.custom_id,
        "response": None,
        "error": {"code": code, "message": messages.get(code, code)},
    }
    return json.dumps(record).encode()


def _mine(claim: Claim) -> Any:
    return update(Line).where(
        Line.batch == claim.batch.seq,
        Line.number == claim.number,
        Line.token == claim.token,
        Line.state == "running",
    )
