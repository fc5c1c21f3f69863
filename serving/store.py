"""Finished pictures behind unguessable ids, for `response_format: url`."""

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

ID_BYTES = 24


@dataclass(frozen=True, slots=True)
class StoredFile:
    data: bytes
    media_type: str
    expires: float


class FileStore:
    """Files in memory that expire `seconds` after they were put; the oldest make room when all of
    them together would exceed `limit` bytes. An id is a key of a table and never a path."""

    def __init__(
        self, seconds: float, limit: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds = seconds
        self._limit = limit
        self._clock = clock
        self._files: OrderedDict[str, StoredFile] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def put(self, data: bytes, media_type: str) -> str:
        """Keep `data` and return its id. Raises ValueError if it alone exceeds the limit."""
        if len(data) > self._limit:
            raise ValueError(f"a file of {len(data)} bytes exceeds the store's {self._limit}")
        id = secrets.token_urlsafe(ID_BYTES)
        with self._lock:
            self._files[id] = StoredFile(data, media_type, self._clock() + self._seconds)
            self._bytes += len(data)
            self._drop_old()
        return id

    def get(self, id: str) -> StoredFile | None:
        """The file, or None if there never was one or it has expired."""
        with self._lock:
            self._drop_old()
            return self._files.get(id)

    def _drop_old(self) -> None:
        now = self._clock()
        while self._files and (self._bytes > self._limit or self._oldest.expires <= now):
            _, file = self._files.popitem(last=False)
            self._bytes -= len(file.data)

    @property
    def _oldest(self) -> StoredFile:
        return next(iter(self._files.values()))
