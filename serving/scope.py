"""Around every HTTP request: its id, its log line, and the last word on unforeseen failures."""

import logging
import time
import uuid
from contextvars import ContextVar

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.errors import as_api_error
from serving.keys import ApiKey
from serving.leftover import Body

HEADER = "x-request-id"
QUIET = (
    "/health", "/ready", "/metrics", "/v1/bishop/queue", "/v1/bishop/read_set",
    "/v1/bishop/replicas",
)  # fmt: skip
"""Paths that are polled; their log lines are for debugging only."""

log = logging.getLogger("bishop.server")

request_id: ContextVar[str] = ContextVar("request_id", default="-")
tenant: ContextVar[ApiKey | None] = ContextVar("tenant", default=None)
"""The API key of the request; None on a server without keys."""


class RequestIdFilter(logging.Filter):
    """Gives every log record of a request its id, as `%(request_id)s`."""

    def filter(self, record: logging.LogRecord) -> bool:
        key = tenant.get()
        record.request_id = request_id.get()
        record.key = None if key is None else key.name
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
        token, key = request_id.set(uuid.uuid4().hex), tenant.set(None)
        body = Body(scope, receive)
        exchange = _Exchange(scope, send, body)
        try:
            await self._answer(scope, body.receive, exchange)
        finally:
            exchange.log()
            exchange.count()
            request_id.reset(token)
            tenant.reset(key)

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

    def __init__(self, scope: Scope, send: Send, body: Body) -> None:
        self._scope = scope
        self._send = send
        self._body = body
        self._start = time.monotonic()
        self.status: int | None = None
        self.gone = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers[HEADER] = request_id.get()
            if not await self._body.finish():
                headers["connection"] = "close"
        await self._send(message)

    def count(self) -> None:
        """Under the address as it is declared: what clients write there would be no label."""
        app, route = self._scope.get("app"), self._scope.get("route")
        state = None if app is None else getattr(app.state, "bishop", None)
        if state is not None:
            path = getattr(route, "path", "unknown")
            status = "gone" if self.gone else str(self.status)
            state.metrics.http.labels(self._scope["method"], path, status).inc()

    def log(self) -> None:
        path = self._scope["path"]
        milliseconds = 1000 * (time.monotonic() - self._start)
        outcome = "client gone" if self.gone else self.status
        level = logging.DEBUG if path in QUIET else logging.INFO
        method = self._scope["method"]
        told = {"method": method, "path": path, "status": self.status, "ms": round(milliseconds)}
        line = "%s %r %s %.0f ms"
        log.log(level, line, method, path, outcome, milliseconds, extra={"http": told})
