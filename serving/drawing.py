"""One request in the engine, from submission until its events end or its client is gone."""

import asyncio
from collections.abc import Coroutine
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from engine.events import Failed, Finished
from engine.service_api import EventStream, ImageService
from scheduler.request import ImageRequest
from serving.errors import ApiError, engine_stopped, server_stopping, too_slow
from serving.limits import Queue
from serving.metrics import BatchMetrics, Metrics
from serving.traces import Tracer

T = TypeVar("T")


class Drawing:
    """Submits `request` and follows it; leaving the context aborts what still runs.

    events: what the engine tells, as counted by `metrics`.
    queue: where the pictures take their places, until the context is left. tracer: makes a span
    of it.
    Raises at once RequestError if the model cannot serve the request, ApiError if the queue is full
    (429) or the engine has stopped (503).
    """

    def __init__(
        self,
        service: ImageService,
        request: ImageRequest,
        metrics: Metrics | BatchMetrics,
        queue: Queue | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._place = ExitStack()
        if queue is not None:
            self._place.enter_context(queue.place(request.n))
        self._service = service
        self._submitted = self._submit(request)
        counted = metrics.observe(self._submitted, request.policy.name)
        self.events = counted if tracer is None else tracer.follow(counted, request)

    def _submit(self, request: ImageRequest) -> EventStream:
        with ExitStack() as undo:
            undo.callback(self._place.close)
            try:
                submitted = self._service.stream(request)
            except RuntimeError:  # it stopped between the check and now
                raise engine_stopped() from None
            undo.pop_all()
        return submitted

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._place.close()
        await self.events.aclose()
        await self._submitted.aclose()

    async def finished(self) -> list[Finished]:
        """All pictures in the order of their seeds. Raises ApiError (500) when one fails."""
        pictures: dict[int, Finished] = {}
        async for event in self.events:
            if isinstance(event, Failed):
                raise self.failure(event)
            if isinstance(event, Finished):
                pictures[event.index] = event
        return [pictures[index] for index in sorted(pictures)]

    def failure(self, event: Failed) -> ApiError:
        """Why a picture is missing; what killed an engine is for its log, not for a client."""
        health = self._service.health()
        if not (health.alive or health.replacing):
            return engine_stopped()
        message = f"picture {event.index} could not be drawn: {event.reason}"
        return ApiError(500, message, code="image_failed")


async def unless_ended(
    work: Coroutine[Any, Any, T], receive: Receive, stopping: asyncio.Event, seconds: float
) -> T:
    """The result of `work`, which is cancelled when its client disconnects, the server stops, or
    `seconds` have passed.

    The request's body must have been read, so that the next message is the disconnect.
    Raises ClientDisconnect or ApiError (503, 504) in those cases.
    """
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnect(receive))
    stopped = asyncio.create_task(_set(stopping))
    try:
        ended = {working, gone, stopped}
        await asyncio.wait(ended, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if gone.done():
            raise ClientDisconnect
        raise server_stopping() if stopped.done() else too_slow(seconds)
    finally:
        await cancelled(working, gone, stopped)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _set(event: asyncio.Event) -> None:
    await event.wait()


async def cancelled(*tasks: asyncio.Task[Any]) -> None:
    """Cancel the tasks that still run and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
