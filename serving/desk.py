"""The job store as handlers see it: calls that do not block the event loop, errors in API terms."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from scheduler.jobs.errors import CorruptRecord, JobError, StoreUnavailable
from scheduler.jobs.store import JobStore
from serving.errors import ApiError

P = ParamSpec("P")
T = TypeVar("T")

THREADS = 6
"""Threads of the store's own: a locked database must not hold those that encode pictures."""


class Desk:
    """Runs what `JobStore` offers in threads."""

    def __init__(self, store: JobStore) -> None:
        self.store = store
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="bishop-jobs")

    async def work(self, run: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `run`; raises what it raises."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: run(*args, **kwargs))

    async def ask(self, run: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`work` for a client: raises ApiError."""
        try:
            return await self.work(run, *args, **kwargs)
        except (JobError, StoreUnavailable, CorruptRecord) as error:
            raise told(error) from error

    async def chunks(self, content: Iterator[bytes]) -> AsyncIterator[bytes]:
        """The pieces of a content, the first of which is there: its absence is an ApiError now,
        while it can still be told."""
        first = await self.ask(next, content, b"")
        return self._following(first, content)

    async def _following(self, first: bytes, content: Iterator[bytes]) -> AsyncIterator[bytes]:
        chunk = first
        while chunk:
            yield chunk
            chunk = await self.work(next, content, b"")

    def close(self) -> None:
        """Hand over what this server holds and wait for the threads."""
        self._threads.submit(self.store.close)
        self._threads.shutdown()


def told(error: JobError | StoreUnavailable | CorruptRecord) -> ApiError:
    """What a client hears of it."""
    match error:
        case JobError():
            status = 409 if error.code == "batch_not_cancellable" else 400
            return ApiError(status, str(error), param=error.param, code=error.code)
        case StoreUnavailable():
            headers = {"retry-after": "5"}
            return ApiError(503, str(error), code="job_store_unavailable", headers=headers)
        case CorruptRecord():
            return ApiError(500, str(error), code="corrupt_record")
