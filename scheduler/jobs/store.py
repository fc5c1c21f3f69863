"""The job store: one database, one storage, and this server's part in them."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from scheduler.jobs.batches import Batches, LineError
from scheduler.jobs.database import Database
from scheduler.jobs.errors import StoreUnavailable
from scheduler.jobs.files import Files
from scheduler.jobs.lines import Lines, NewLine
from scheduler.jobs.results import ResultFiles
from scheduler.jobs.shared import Shared, file_key
from scheduler.jobs.storage import Storage, Writer
from scheduler.jobs.tables import Batch
from scheduler.jobs.validate import MAX_LINES, Validation
from scheduler.jobs.workers import Workers

INSERTED = 500
"""Lines stored in one transaction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsConfig:
    """Where jobs are kept.

    folder: holds what the URLs do not name: `jobs.sqlite` and `storage/`.
    database, storage: URLs; see `Database` and `Storage`.
    lease_seconds: silence after which other servers take over a server's lines.
    """

    folder: Path
    database: str | None = None
    storage: str | None = None
    lease_seconds: float = 15.0
    max_lines: int = MAX_LINES

    def __post_init__(self) -> None:
        if not self.lease_seconds > 0:
            raise ValueError(f"lease_seconds must be above 0, got {self.lease_seconds}")
        if not 1 <= self.max_lines <= MAX_LINES:
            raise ValueError(f"max_lines must lie in 1..{MAX_LINES}, got {self.max_lines}")

    @property
    def database_url(self) -> str:
        return self.database or f"sqlite:///{self.folder.absolute() / 'jobs.sqlite'}"

    @property
    def storage_url(self) -> str:
        return self.storage or str(self.folder.absolute() / "storage")


class JobStore:
    """Every method blocks; call it from a thread that may wait.

    Opening it raises ValueError for a URL that cannot be used, StoreUnavailable for a database
    or a storage that does not answer.
    """

    def __init__(
        self,
        config: JobsConfig,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        storage = Storage(config.storage_url)
        shared = Shared(Database(config.database_url), storage, clock)
        self.config = config
        self.worker = shared.worker
        self._shared = shared
        self.files = Files(shared)
        self.batches = Batches(shared, self.files)
        self.lines = Lines(shared, self.batches)
        self.workers = Workers(shared, config.lease_seconds, monotonic)
        self.results = ResultFiles(shared, self.files, self.batches, self.lines)

    def writer(self, file_id: str) -> Writer:
        """For the content of a file that was begun."""
        return self._shared.storage.writer(file_key(file_id))

    def content(self, file_id: str) -> Iterator[bytes]:
        return self._shared.storage.chunks(file_key(file_id))

    def validate(self, batch: Batch) -> bool:
        """Read a claimed batch's input file and store its lines; False if it was refused.

        Raises LeaseLost."""
        validation = Validation(batch.endpoint, self.config.max_lines)
        if self.files.get(batch.tenant, batch.input_file_id) is None:
            validation.errors.append(_deleted())
        else:
            self._store_lines(batch, validation)
        if validation.errors:
            self.batches.refuse(batch, validation.errors)
            return False
        self.batches.validated(batch, validation.count)
        return True

    def _store_lines(self, batch: Batch, validation: Validation) -> None:
        lines: list[NewLine] = []
        for line in validation.read(self.content(batch.input_file_id)):
            lines.append(line)
            if len(lines) == INSERTED and not validation.errors:
                self.lines.add(batch, lines)
            if len(lines) == INSERTED:
                lines.clear()
        if lines and not validation.errors:
            self.lines.add(batch, lines)

    def keep(self) -> None:
        """Housekeeping: who is silent, what is over, what may be removed."""
        self.workers.take_over()
        self.batches.expire()
        self.batches.sweep()
        self.files.sweep()

    def close(self) -> None:
        """Hand over what this server holds. What cannot be reached is taken over by lease."""
        self._shared.closing.set()
        try:
            self.workers.leave()
        except StoreUnavailable:
            return
        finally:
            self._shared.database.close()


def _deleted() -> LineError:
    return LineError("file_not_found", "the input file was deleted before it was read")
