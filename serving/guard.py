"""Before any handler: is the server leaving, who asks, and may they ask now?"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.errors import ApiError, server_stopping
from serving.keys import ApiKey
from serving.scope import tenant
from serving.state import ServerState

GUARDED = "/v1/"
OPEN = "/v1/images/files/"
"""Pictures behind unguessable ids: whoever has the address may see them."""

LOOKS = "/v1/bishop/"
"""Looks at the server, which a page takes every second: they need a key and count against no
limit of it."""


CHANGES = "/v1/bishop/replicas"
"""Posting here changes the server for everybody: it takes a key of an admin."""


class Guard:
    """ASGI middleware over `GUARDED` paths. It refuses by exceptions; `RequestScope` answers."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(GUARDED):
            await self._app(scope, receive, send)
            return
        with self._let_in(scope):
            timed = _Timed(receive, self._state.config.body_seconds)
            await self._app(scope, timed.receive, send)

    @contextmanager
    def _let_in(self, scope: Scope) -> Iterator[None]:
        """Raises ApiError with the reason to stay out."""
        state = self._state
        if state.drain.started:
            raise self._counted(server_stopping(), "draining")
        with state.drain.request():
            if not state.keys or scope["path"].startswith(OPEN):
                yield
                return
            key = self._key(HTTPConnection(scope).headers.get("authorization", ""))
            self._check_right(key, scope)
            if scope["path"].startswith(LOOKS):
                yield
                return
            with self._within_limits(key):
                yield

    @contextmanager
    def _within_limits(self, key: ApiKey) -> Iterator[None]:
        place = self._state.key_limits.place(key)
        try:
            place.__enter__()
        except ApiError as error:
            raise self._counted(error, error.code or "limit") from None
        tenant.set(key)  # until the request is logged: RequestScope takes it back
        try:
            yield
        finally:
            place.__exit__(None, None, None)

    def _check_right(self, key: ApiKey, scope: Scope) -> None:
        if scope["path"].startswith(CHANGES) and scope["method"] == "POST" and not key.admin:
            message = "this key may not change the server: it takes one with 'admin: true'"
            raise self._counted(ApiError(403, message, code="forbidden"), "forbidden")

    def _key(self, header: str) -> ApiKey:
        scheme, _, presented = header.partition(" ")
        key = self._state.keys.find(presented.strip()) if scheme.lower() == "bearer" else None
        if key is None:
            message = "send a key of this server: 'Authorization: Bearer KEY'"
            headers = {"www-authenticate": "Bearer"}
            error = ApiError(401, message, code="invalid_api_key", headers=headers)
            raise self._counted(error, "invalid_api_key")
        return key

    def _counted(self, error: ApiError, reason: str) -> ApiError:
        self._state.metrics.rejected.labels(reason).inc()
        return error


class _Timed:
    """A body that stops arriving does not hold its connection for ever."""

    def __init__(self, receive: Receive, seconds: float) -> None:
        self._receive = receive
        self._seconds = seconds
        self._whole = False

    async def receive(self) -> Message:
        """Raises ApiError (408) if the next piece of the body does not come in time."""
        if self._whole:
            return await self._receive()
        try:
            async with asyncio.timeout(self._seconds):
                message = await self._receive()
        except TimeoutError:
            reason = f"the body did not arrive: nothing came for {self._seconds:g} s"
            raise ApiError(408, reason, code="body_timeout") from None
        self._whole = not message.get("more_body", False)
        return message
