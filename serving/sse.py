"""Server-sent events: a picture as it is drawn, and comments that keep a quiet stream open."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from starlette.types import Receive, Scope, Send

from engine.events import Event, Failed, Finished, Partial, Progress
from serving.answers import CompletedEvent, PartialImageEvent, ProgressEvent
from serving.body import GenerationBody
from serving.drawing import Drawing, cancelled, unless_ended
from serving.errors import ApiError, as_api_error
from serving.render import completed_event, partial_event, progress_event
from serving.state import ServerState


class PictureStream(EventSourceResponse):
    """The events of one drawing, which is aborted as soon as the client is gone."""

    def __init__(
        self, drawing: Drawing, body: GenerationBody, state: ServerState, headers: Mapping[str, str]
    ) -> None:
        self._drawing = drawing
        self._state = state
        self._lines = with_pings(_lines(drawing, body), state.config.ping_seconds)
        super().__init__(self._lines, headers={"cache-control": "no-store", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._state
        async with self._drawing, aclosing(self._lines):
            sending = self.stream_response(send)
            try:
                await unless_ended(sending, receive, state.stopping, state.config.request_seconds)
            except ApiError as error:
                last = _error_line(error)
                await send({"type": "http.response.body", "body": last, "more_body": False})


async def _lines(drawing: Drawing, body: GenerationBody) -> AsyncGenerator[bytes, None]:
    """Every event as bytes. A failure after the first byte can only be told in an event."""
    try:
        async for event in drawing.events:
            told = await _tell(event, drawing, body)
            if told is not None:
                data = told.model_dump_json(exclude_none=True)
                yield format_sse_event(event=told.type, data_str=data)
    except Exception as error:
        yield _error_line(as_api_error(error))


def _error_line(error: ApiError) -> bytes:
    return format_sse_event(event="error", data_str=json.dumps({"type": "error", **error.body}))


async def _tell(
    event: Event, drawing: Drawing, body: GenerationBody
) -> PartialImageEvent | CompletedEvent | ProgressEvent | None:
    match event:
        case Progress() if body.progress:
            return progress_event(event)
        case Partial():
            return await partial_event(body, event)
        case Finished():
            return await completed_event(body, event)
        case Failed():
            raise drawing.failure(event)
    return None


async def with_pings(
    lines: AsyncGenerator[bytes, None], seconds: float
) -> AsyncGenerator[bytes, None]:
    """Pass `lines` on, with a comment after every `seconds` of silence."""
    async with aclosing(lines):
        following = _next(lines)
        try:
            while True:
                ready, _ = await asyncio.wait({following}, timeout=seconds)
                line = following.result() if ready else KEEPALIVE_COMMENT
                if not line:
                    return
                yield line
                following = _next(lines) if ready else following
        finally:
            await cancelled(following)


def _next(lines: AsyncGenerator[bytes, None]) -> asyncio.Task[bytes]:
    """The next line, or b"" at the end (an event is never empty)."""
    return asyncio.create_task(_next_or_empty(lines))


async def _next_or_empty(lines: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(lines, b"")
