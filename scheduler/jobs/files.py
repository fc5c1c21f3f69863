"""Files that users upload and that batches end in."""

from typing import Final, Literal

from sqlalchemy import Select, select, update
from sqlalchemy.orm import Session

from scheduler.jobs.errors import JobError, LeaseLost
from scheduler.jobs.shared import Page, Shared, file_key, new_id
from scheduler.jobs.tables import File

MAX_FILE_BYTES: Final = 200 << 20
SWEEP: Final = 100
"""Files removed in one sweep."""

Order = Literal["asc", "desc"]


class Files:
    """A tenant (the name of an API key; "" without keys) sees its own files alone."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    def begin(self, tenant: str, purpose: str, filename: str, seconds: int | None) -> File:
        """A row for content that will be written; nobody sees it before `ready`."""
        now = self._shared.now()
        file = File(
            id=new_id("file-"),
            tenant=tenant,
            purpose=purpose,
            filename=filename,
            state="writing",
            worker=self._shared.worker,
            created_at=now,
            expires_at=None if seconds is None else now + seconds,
        )
        with self._shared.database.write() as session:
            session.add(file)
        return file

    def ready(self, id: str, size: int, filename: str, seconds: int | None) -> File:
        """Show the file, whose content has been published; it lives `seconds` from its creation.

        Raises LeaseLost."""
        with self._shared.database.write() as session:
            file = self.show(session, id, size)
            file.filename = filename
            file.expires_at = None if seconds is None else file.created_at + seconds
            return file

    def show(self, session: Session, id: str, size: int) -> File:
        """`ready` within a transaction of the caller."""
        file = session.scalar(select(File).where(File.id == id).with_for_update())
        if file is None or file.state != "writing" or file.worker != self._shared.worker:
            raise LeaseLost(f"file {id} was given up while it was written")
        file.state, file.worker, file.bytes = "ready", None, size
        return file

    def get(self, tenant: str, id: str) -> File | None:
        """None if there is no such file, or it has expired."""
        with self._shared.database.read() as session:
            return session.scalar(self._visible(tenant).where(File.id == id))

    def list(
        self, tenant: str, purpose: str | None, after: str | None, limit: int, order: Order
    ) -> Page[File]:
        """Files after the one named `after`. Raises JobError if there is no such file."""
        query = self._visible(tenant)
        if purpose is not None:
            query = query.where(File.purpose == purpose)
        with self._shared.database.read() as session:
            if after is not None:
                seq = _seq_of(session, tenant, after)
                query = query.where(File.seq > seq if order == "asc" else File.seq < seq)
            by = File.seq.asc() if order == "asc" else File.seq.desc()
            found = list(session.scalars(query.order_by(by).limit(limit + 1)))
        return Page(found[:limit], len(found) > limit)

    def delete(self, tenant: str, id: str) -> bool:
        """False if there is no such file. Its content is gone when this returns."""
        with self._shared.database.write() as session:
            gone = session.execute(
                update(File)
                .where(File.tenant == tenant, File.id == id, File.state == "ready")
                .values(state="deleted")
            ).rowcount  # type: ignore[attr-defined]
        if gone:
            self._remove(id)
        return bool(gone)

    def discard(self, id: str) -> None:
        """Give up a file that is being written."""
        with self._shared.database.write() as session:
            mine = (File.id == id, File.state == "writing", File.worker == self._shared.worker)
            session.execute(update(File).where(*mine).values(state="deleted", worker=None))
        self._remove(id)

    def sweep(self) -> int:
        """Remove what has expired or was deleted; returns how many files."""
        with self._shared.database.write() as session:
            late = (File.state == "ready", File.expires_at <= self._shared.now())
            session.execute(update(File).where(*late).values(state="deleted"))
            query = select(File.id).where(File.state == "deleted").limit(SWEEP)
            gone = list(session.scalars(query))
        for id in gone:
            self._remove(id)
        return len(gone)

    def _visible(self, tenant: str) -> Select[File]:
        now = self._shared.now()
        alive = File.expires_at.is_(None) | (File.expires_at > now)
        return select(File).where(File.tenant == tenant, File.state == "ready", alive)

    def _remove(self, id: str) -> None:
        """First the content, then the row: a crash between leaves a row that is swept again."""
        self._shared.storage.delete(file_key(id))
        with self._shared.database.write() as session:
            file = session.scalar(select(File).where(File.id == id, File.state == "deleted"))
            if file is not None:
                session.delete(file)


def _seq_of(session: Session, tenant: str, id: str) -> int:
    seq = session.scalar(select(File.seq).where(File.tenant == tenant, File.id == id))
    if seq is None:
        raise JobError("there is no file with this id to list after", "after")
    return seq
