"""Around every HTTP request: its id, its log line, and the last word on unforeseen failures."""

import logging
import time
import uuid
from contextvars import ContextVar

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.errors import as_api_error

HEADER = "x-request-id"
QUIET = ("/health", "/ready", "/metrics")
"""Paths that are polled; their log lines are for debugging only."""

log = logging.getLogger("bishop.server")

request_id: ContextVar[str] = ContextVar("request_id", default="-")


class RequestIdFilter(logging.Filter):
    """Gives every log record of a request its id, as `%(request_id)s`."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = request_id.get()
        return True


class RequestScope:
    """ASGI middleware: a fresh uuid per request in `x-request-id`, a log line at its end, and an
    error body instead of a broken connection when a handler fails before it has answered."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        token = request_id.set(uuid.uuid4().hex)
        exchange = _Exchange(scope, send)
        try:
            await self._answer(scope, receive, exchange)
        finally:
            exchange.log()
            request_id.reset(token)

    async def _answer(self, scope: Scope, receive: Receive, exchange: "_Exchange") -> None:
        try:
            await self.app(scope, receive, exchange.send)
        except ClientDisconnect:
            exchange.gone = True
        except Exception as error:
            response = as_api_error(error).response
            if exchange.status is not None:
                raise
            await response(scope, receive, exchange.send)


class _Exchange:
    """One request and what has been answered so far."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._start = time.monotonic()
        self.status: int | None = None
        self.gone = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)[HEADER] = request_id.get()
        await self._send(message)

    def log(self) -> None:
        path = self._scope["path"]
        milliseconds = 1000 * (time.monotonic() - self._start)
        outcome = "client gone" if self.gone else self.status
        level = logging.DEBUG if path in QUIET else logging.INFO
        log.log(level, "%s %r %s %.0f ms", self._scope["method"], path, outcome, milliseconds)
