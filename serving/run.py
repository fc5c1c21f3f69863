"""Running the service: one socket, one engine, one event loop, and a stop that loses nothing."""

import logging
import signal
import socket
import sys
from types import FrameType

import uvicorn

from engine.service_api import ImageService
from serving.app import create_app
from serving.config import ServerConfig
from serving.logs import log_to_stderr
from serving.state import ServerState
from serving.traces import Tracer

log = logging.getLogger("bishop.server")

BACKLOG = 2048

LAST_WORDS = 5
"""Seconds for the answers that say that the server stops."""


class ListenError(Exception):
    """The address cannot be had; the message says why."""


def listen(config: ServerConfig) -> socket.socket:
    """Claim the address before anything slow is done. Raises ListenError."""
    try:
        family = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0][0]
        return _bound(family, config)
    except OSError as error:
        reason = f"cannot listen on {config.host}:{config.port}: {error.strerror or error}"
        raise ListenError(f"{reason}; choose another --port or --host") from None


def _bound(family: int, config: ServerConfig) -> socket.socket:
    # asyncio turns Nagle's delay off only where the protocol is spelled out: 40 ms an answer.
    claimed = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        claimed.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        claimed.bind((config.host, config.port))
        claimed.listen(BACKLOG)
    except OSError:
        claimed.close()
        raise
    return claimed


def run(
    service: ImageService,
    config: ServerConfig,
    claimed: socket.socket,
    tracer: Tracer | None = None,
) -> None:
    """Serve on `claimed` until SIGTERM or SIGINT, then let requests end and stop the engine."""
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, _leave)
    log_to_stderr(config.log_format)
    try:
        service.start()
        announce(service, config, claimed)
        Server(service, config, tracer).run(sockets=[claimed])
    finally:
        service.stop()
        if tracer is not None:
            tracer.close()
        log.info("stopped")


class Server(uvicorn.Server):
    """Stops in two steps: for `stop_seconds`, what is new is refused while requests and batch lines
    may end by themselves; then requests are answered that the server stops, and lines are given
    back to the job store."""

    def __init__(
        self, service: ImageService, config: ServerConfig, tracer: Tracer | None = None
    ) -> None:
        app = create_app(service, config, tracer)
        self._state: ServerState = app.state.bishop
        self._seconds = config.stop_seconds
        settings = uvicorn.Config(
            app,
            backlog=BACKLOG,
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=LAST_WORDS,
        )
        super().__init__(settings)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state = self._state
        for worker in state.pump:
            worker.leave()

        def busy() -> bool:
            lines = any(worker.running for worker in state.pump)
            return lines and not self.force_exit

        await state.drain.wait(self._seconds, busy)
        state.stopping.set()
        await super().shutdown(sockets)


def _leave(signum: int, frame: FrameType | None) -> None:
    sys.exit(0)


def announce(service: ImageService, config: ServerConfig, claimed: socket.socket) -> None:
    """Say where the service is, and warn if everybody may use it."""
    host, port = claimed.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    log.info("serving %s at http://%s:%d", service.model.name, shown, port)
    if not config.local and not config.keys:
        log.warning("%s is reachable from other machines and asks nobody for a key", shown)
