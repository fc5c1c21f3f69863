"""Following requests: from the callbacks of whoever draws them to iterators for front ends."""

import asyncio
import queue
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

from engine.events import Event, Failed, Finished
from scheduler.request import ImageRequest

Listener = Callable[[Event | Exception], None]
"""Hears every event of a request, from any thread; an exception is the last thing it hears."""


class Submits(Protocol):
    """What draws requests and tells their events to a listener."""

    def submit(self, request: ImageRequest, listen: Listener) -> None:
        """Queue a request. Raises RequestError for what cannot be drawn, RuntimeError when
        nothing is drawn any more."""

    def abort(self, id: str) -> None:
        """Drop what is left of a request; its listener hears nothing more. Unknown ids are
        ignored."""


def follow(drawer: Submits, request: ImageRequest) -> "Following":
    """Submit and follow a request from asyncio; closing the stream aborts what is left of it."""
    loop = asyncio.get_running_loop()
    inbox: asyncio.Queue[Event | Exception] = asyncio.Queue()
    abort = partial(drawer.abort, request.id)

    def listen(item: Event | Exception) -> None:
        try:
            loop.call_soon_threadsafe(inbox.put_nowait, item)
        except RuntimeError:  # the loop has closed with its reader; the drawing goes on
            abort()

    drawer.submit(request, listen)
    return Following(inbox, request.n, abort)


def follow_all(drawer: Submits, requests: Sequence[ImageRequest]) -> Iterator[tuple[int, Event]]:
    """Submit many requests from a plain thread and yield (request index, event)."""
    inbox: queue.SimpleQueue[tuple[int, Event | Exception]] = queue.SimpleQueue()
    for index, request in enumerate(requests):
        drawer.submit(request, lambda item, index=index: inbox.put((index, item)))  # type: ignore[misc]
    open_images = sum(request.n for request in requests)
    try:
        while open_images:
            index, item = inbox.get()
            if isinstance(item, Exception):
                raise item
            open_images -= isinstance(item, Finished | Failed)
            yield index, item
    finally:
        if open_images:
            for request in requests:
                drawer.abort(request.id)


class Following:
    """The events of one submitted request, as an `EventStream`."""

    def __init__(
        self, inbox: asyncio.Queue[Event | Exception], images: int, abort: Callable[[], None]
    ) -> None:
        self._inbox, self._open_images, self._abort = inbox, images, abort

    def __aiter__(self) -> "Following":
        return self

    async def __anext__(self) -> Event:
        if not self._open_images:
            raise StopAsyncIteration
        item = await self._inbox.get()
        if isinstance(item, Exception):
            self._open_images = 0
            raise item
        self._open_images -= isinstance(item, Finished | Failed)
        return item

    async def aclose(self) -> None:
        if self._open_images:
            self._open_images = 0
            self._abort()
