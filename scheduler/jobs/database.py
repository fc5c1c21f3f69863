"""Transactions on SQLite or PostgreSQL. What fails because of the database is StoreUnavailable."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, insert, select
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session

from scheduler.jobs.errors import StoreUnavailable
from scheduler.jobs.tables import SCHEMA_VERSION, Base, Schema

BUSY_SECONDS = 5
"""How long a transaction waits for a lock before it gives up."""

_READ = "bishop_read"


class Database:
    """url: `sqlite:///path` or `postgresql://user@host/name`.

    Raises ValueError for any other URL, and StoreUnavailable if it cannot be opened.
    """

    def __init__(self, url: str, busy_seconds: float = BUSY_SECONDS) -> None:
        self._url = parse_url(url)
        self._busy = busy_seconds
        self._file = Path(self._url.database or "") if self._is_sqlite else None
        self._engine = self._open()
        self._inode: int | None = None
        self._create()
        self._inode = self._current_inode()

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A transaction that no other writer interleaves with (on PostgreSQL: by row locks)."""
        with self._session(read=False) as session:
            yield session

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A consistent view; it never waits for writers."""
        with self._session(read=True) as session:
            yield session

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def _session(self, read: bool) -> Iterator[Session]:
        try:
            self._check_file()
            with Session(self._engine, expire_on_commit=False) as session, session.begin():
                session.connection(execution_options={_READ: read})
                yield session
        except IntegrityError:
            raise
        except (DBAPIError, PoolTimeout) as error:
            raise StoreUnavailable(f"the job database: {_reason(error)}") from error

    def _create(self) -> None:
        try:
            with self._engine.begin() as connection:
                Base.metadata.create_all(connection)
                versions = list(connection.scalars(select(Schema.version)))
                if not versions:
                    connection.execute(insert(Schema).values(version=SCHEMA_VERSION))
        except IntegrityError:
            versions = []  # another server was first
        except (DBAPIError, PoolTimeout) as error:
            raise StoreUnavailable(f"the job database: {_reason(error)}") from error
        if versions not in ([], [SCHEMA_VERSION]):
            raise ValueError(
                f"the job database has tables of version {versions}, this program knows "
                f"{SCHEMA_VERSION}: use another database or the program that wrote it"
            )

    def _open(self) -> Engine:
        if not self._is_sqlite:
            options = f"-c lock_timeout={int(1000 * self._busy)}"
            connect = {"connect_timeout": max(1, int(self._busy)), "options": options}
            return create_engine(self._url, pool_pre_ping=True, connect_args=connect)
        assert self._file is not None
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreUnavailable(f"the folder of the job database: {error}") from error
        # check_same_thread: the pool hands a connection to one thread at a time.
        connect = {"timeout": self._busy, "check_same_thread": False}
        engine = create_engine(self._url, connect_args=connect)
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        return engine

    @property
    def _is_sqlite(self) -> bool:
        return self._url.get_backend_name() == "sqlite"

    def _current_inode(self) -> int | None:
        try:
            return self._file.stat().st_ino if self._file is not None else None
        except OSError:
            return None

    def _check_file(self) -> None:
        """Open connections outlive a deleted file: what they wrote would be lost in silence."""
        if self._file is None or self._inode is None:
            return
        inode = self._current_inode()
        if inode is None:
            raise StoreUnavailable("the file of the job database is gone: put it back")
        if inode != self._inode:
            self._engine.dispose()
            self._create()
            self._inode = inode


def parse_url(text: str) -> URL:
    """The URL with its driver. Raises ValueError if it names no database that is supported."""
    try:
        url = make_url(text)
        backend = url.get_backend_name()
    except (ArgumentError, NoSuchModuleError, ValueError):
        backend = None
    if backend == "sqlite" and url.database and url.database != ":memory:":
        return url
    if backend in ("postgresql", "postgres"):
        return url.set(drivername="postgresql+psycopg")
    raise ValueError("a job database is sqlite:///PATH or postgresql://USER:PASSWORD@HOST/NAME")


def _prepare_sqlite(connection: Any, record: object) -> None:
    # The driver's own transactions are off: BEGIN is ours, see _begin_sqlite.
    connection.isolation_level = None
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin_sqlite(connection: Connection) -> None:
    # A writer takes the lock at once: one that starts reading could never upgrade under load.
    read = connection.get_execution_options().get(_READ, False)
    connection.exec_driver_sql("BEGIN" if read else "BEGIN IMMEDIATE")


def _reason(error: Exception) -> str:
    cause = getattr(error, "orig", None) or error
    return str(cause).strip().split("\n")[0] or type(cause).__name__
