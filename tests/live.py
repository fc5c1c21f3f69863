"""A real server on a loopback port, for tests that need one."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from engine.service_api import ImageService
from server import create_app
from serving.config import ServerConfig
from tests.fakes import wait_until


@contextmanager
def serving(service: ImageService, config: ServerConfig | None = None) -> Iterator[str]:
    """The base URL of a running server over a started `service`; both stop at the end."""
    claimed = socket.create_server(("127.0.0.1", 0))
    app = create_app(service, config or ServerConfig())
    settings = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=2)
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([claimed])), daemon=True)
    service.start()
    thread.start()
    assert wait_until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{claimed.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        service.stop()
