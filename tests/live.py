"""A real server on a loopback port, for tests that need one."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from engine.service_api import ImageService
from serving.config import ServerConfig
from serving.run import Server, listen
from serving.traces import Tracer
from tests.fakes import wait_until


@contextmanager
def serving(
    service: ImageService, config: ServerConfig | None = None, tracer: Tracer | None = None
) -> Iterator[str]:
    """The base URL of a running server over a started `service`; both stop at the end."""
    config = replace(config or ServerConfig(), port=0, stop_seconds=1)
    claimed = listen(config)
    server = Server(service, config, tracer)
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
