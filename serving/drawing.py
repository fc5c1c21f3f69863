"""One request in the engine, from submission until its events end or its client is gone."""

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from engine.events import Failed, Finished
from engine.service_api import ImageService
from scheduler.request import ImageRequest
from serving.errors import ApiError, engine_stopped, server_stopping
from serving.metrics import Metrics

T = TypeVar("T")


class Drawing:
    """Submits `request` and follows it; leaving the context aborts what still runs.

    events: what the engine tells, as counted by `metrics`.
    Raises at once RequestError if the model cannot serve the request, ApiError (503) if the
    engine has stopped.
    """

    def __init__(self, service: ImageService, request: ImageRequest, metrics: Metrics) -> None:
        try:
            self._submitted = service.stream(request)
        except RuntimeError:  # it stopped between the check and now
            raise engine_stopped() from None
        self._service = service
        self.events = metrics.observe(self._submitted)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        if not self._service.health().alive:
            return engine_stopped()
        message = f"picture {event.index} could not be drawn: {event.reason}"
        return ApiError(500, message, code="image_failed")


async def unless_ended(
    work: Coroutine[Any, Any, T], receive: Receive, stopping: asyncio.Event
) -> T:
    """The result of `work`, which is cancelled when its client disconnects or the server stops.

    The request's body must have been read, so that the next message is the disconnect.
    Raises ClientDisconnect or ApiError (503) in those cases.
    """
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnect(receive))
    stopped = asyncio.create_task(_set(stopping))
    try:
        await asyncio.wait({working, gone, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect if gone.done() else server_stopping()
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
