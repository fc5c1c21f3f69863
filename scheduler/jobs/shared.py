"""What every part of the store needs: where things lie, who this server is, what time it is."""

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from scheduler.jobs.database import Database
from scheduler.jobs.storage import Storage

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shared:
    """clock: seconds since 1970; it may step. worker: the id under which this server leases.

    closing: set when the server leaves; long work in other threads ends."""

    database: Database
    storage: Storage
    clock: Callable[[], float] = time.time
    worker: str = field(default_factory=lambda: uuid.uuid4().hex)
    closing: threading.Event = field(default_factory=threading.Event)

    def now(self) -> int:
        return int(self.clock())


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """A part of a list, and whether more follows."""

    items: Sequence[T]
    more: bool


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


def file_key(id: str) -> str:
    """Where the content of a file lies."""
    return f"files/{id}"


def lines_key(batch_id: str) -> str:
    """The folder of a batch's line records."""
    return f"lines/{batch_id}"


def record_key(batch_id: str, number: int, token: str) -> str:
    return f"{lines_key(batch_id)}/{number}-{token}.json"
