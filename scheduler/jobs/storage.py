"""Contents of files and records of lines, in a folder or an object store (fsspec).

A key is there whole or not at all: a local file is written beside its place, synced and renamed;
an object store publishes an object when its upload is complete.
"""

import os
import posixpath
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import fsspec
from fsspec.implementations.local import LocalFileSystem

from scheduler.jobs.errors import StoreUnavailable

CHUNK = 1 << 20


class Storage:
    """url: a folder, or `s3://bucket/prefix` and whatever else fsspec has a driver for.

    Raises ValueError if there is no driver for it, StoreUnavailable if it cannot be used.
    """

    def __init__(self, url: str) -> None:
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise ValueError(f"the storage {url.split('://')[0]}://: {error}") from error
        with _told():
            self._fs.makedirs(self._root, exist_ok=True)

    @property
    def local(self) -> bool:
        return isinstance(self._fs, LocalFileSystem)

    def writer(self, key: str) -> "Writer":
        """Start writing `key`; nothing is there before `commit`."""
        return Writer(self._fs, self._path(key), self.local)

    def put(self, key: str, data: bytes) -> None:
        with self.writer(key) as writer:
            writer.write(data)
            writer.commit()

    def get(self, key: str) -> bytes | None:
        """The content, or None if there is none."""
        with _told():
            try:
                data: bytes = self._fs.cat_file(self._path(key))
            except FileNotFoundError:
                return None
            return data

    def chunks(self, key: str, size: int = CHUNK) -> Iterator[bytes]:
        """The content piece by piece. Raises StoreUnavailable, also if it is gone."""
        with _told(), self._fs.open(self._path(key), "rb", block_size=size) as file:
            while chunk := file.read(size):
                yield chunk

    def delete(self, key: str) -> None:
        """Remove `key`; it is no error if it is not there."""
        with _told():
            try:
                self._fs.rm_file(self._path(key))
            except FileNotFoundError:
                return

    def delete_under(self, folder: str) -> None:
        """Remove everything below `folder`; it is no error if there is nothing."""
        with _told():
            try:
                self._fs.rm(self._path(folder), recursive=True)
            except FileNotFoundError:
                return

    def _path(self, key: str) -> str:
        return posixpath.join(self._root, key)


class Writer:
    """One content being written. Leaving the context without `commit` discards it."""

    def __init__(self, fs: Any, path: str, local: bool) -> None:
        self._fs, self._path, self._local = fs, path, local
        self._open = True
        self._at = f"{path}.{uuid.uuid4().hex}.part" if local else path
        with _told():
            if local:
                fs.makedirs(posixpath.dirname(path), exist_ok=True)
            self._file = fs.open(self._at, "wb", autocommit=local)

    def write(self, data: bytes) -> None:
        with _told():
            self._file.write(data)

    def commit(self) -> None:
        """Publish what was written."""
        with _told():
            if self._local:
                self._file.flush()
                os.fsync(self._file.fileno())
            self._file.close()
            if self._local:
                os.replace(self._at, self._path)  # noqa: PTH105  (the path is a string of fsspec)
            else:
                self._file.commit()
        self._open = False

    def discard(self) -> None:
        if not self._open:
            return
        self._open = False
        try:
            if self._local:
                self._file.close()
                self._fs.rm_file(self._at)
            else:
                self._file.discard()
        except (OSError, AttributeError):
            return  # what is left is no key that anyone reads

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.discard()


@contextmanager
def _told() -> Iterator[None]:
    """Failures of the medium as StoreUnavailable, without paths of this machine."""
    try:
        yield
    except FileNotFoundError as error:
        raise StoreUnavailable("the job storage: a content is gone") from error
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise StoreUnavailable(f"the job storage: {reason}") from error
    except Exception as error:  # drivers of object stores raise what they like
        raise StoreUnavailable(f"the job storage: {type(error).__name__}") from error
