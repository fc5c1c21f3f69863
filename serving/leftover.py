"""What a client still sends when its answer is ready.

Closing a connection with unread data in it resets it: the client may never see the answer, or its
next request on that connection is lost. So a short rest is read and dropped, and after a long one
the connection is announced to end.
"""

import asyncio

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope

READ_ON = 4 << 20
"""Bytes of a rest that are read and dropped."""

SECONDS = 2.0


class Body:
    """One request's body: `receive` in place of the server's own, `finish` before an answer."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        headers = Headers(scope=scope)
        length = headers.get("content-length", "0")
        self._receive = receive
        self._whole = length == "0" and "transfer-encoding" not in headers

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self._whole = True
        return message

    async def finish(self) -> bool:
        """Read a short rest; False if there is more, and the connection has to end."""
        if self._whole:
            return True
        try:
            async with asyncio.timeout(SECONDS):
                return await self._read_on()
        except TimeoutError:
            return False

    async def _read_on(self) -> bool:
        dropped = 0
        while not self._whole and dropped <= READ_ON:
            message = await self.receive()
            dropped += len(message.get("body", b""))
        return self._whole
