"""Files of the disk tier: space is reserved when they are made; they vanish with the process."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from jaxtyping import UInt8
from torch import Tensor

Run = tuple[int, int, int]


class OffloadError(OSError):
    """Something beyond the memory cannot be reached; the message says what to do."""


def reserve(descriptor: int, size: int, folder: Path, start: int = 0) -> None:
    """Take bytes `start` to `size` of a file now: writing them later cannot fail for want of space.

    Raises OffloadError with the numbers if there is less. File systems that cannot reserve are
    trusted with what they say is free.
    """
    free = shutil.disk_usage(folder).free
    try:
        os.posix_fallocate(descriptor, start, max(1, size - start))
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS) and size - start <= free:
            return
        raise OffloadError(
            f"the offload folder {folder} has no room for {(size - start) / 1e9:.3f} GB "
            f"({free / 1e9:.3f} GB are free: {error.strerror}): free some, choose another "
            "--offload-dir, or place less on disk"
        ) from error


class ScratchFile:
    """A file in `folder` without a name: nothing is left behind, whatever happens. Bytes `start` to
    `size` are reserved; what lies before is taken from the disk as it is written.

    Raises OffloadError if the folder cannot be written or the disk is too full.
    """

    def __init__(self, folder: Path, size: int, start: int = 0) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor, path = tempfile.mkstemp(prefix="bishop-", dir=folder)
            os.unlink(path)  # noqa: PTH108 - a name from mkstemp
        except OSError as error:
            raise OffloadError(f"cannot write into the offload folder {folder}: {error}") from error
        try:
            reserve(self._descriptor, size, folder, start)
        except OffloadError:
            self.close()
            raise

    def read(self, runs: Iterable[Run], target: UInt8[Tensor, "n"]) -> int:
        """Copy runs (byte of the file, byte of the target, bytes) to the host; returns how many
        bytes that were. Raises OSError."""
        into, total = target.numpy().data, 0
        for at, to, size in runs:
            done = 0
            while done < size:
                count = os.preadv(self._descriptor, [into[to + done : to + size]], at + done)
                if not count:
                    raise OSError(f"the offloaded cache ends before byte {at + size}")
                done += count
            total += size
        return total

    def write(self, places: Iterable[int], rows: UInt8[Tensor, "n size"]) -> int:
        """Write each row at its byte of the file; returns how many bytes that were. Raises
        OSError."""
        data, size = rows.contiguous().view(-1).numpy().data, rows.shape[1]
        for i, at in enumerate(places):
            done = 0
            while done < size:
                done += os.pwrite(
                    self._descriptor, data[i * size + done : (i + 1) * size], at + done
                )
        return rows.nbytes

    def flush(self) -> None:
        """Wait until everything written is on the disk."""
        os.fsync(self._descriptor)

    def forget(self) -> None:
        """Have the system drop what it keeps of the file: the next reads are the disk's."""
        os.fsync(self._descriptor)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            self.close()
