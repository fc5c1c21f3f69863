"""What the handlers of one server share."""

import asyncio
import time
from collections.abc import Sized
from dataclasses import dataclass, field
from typing import Protocol

from fastapi import Request

from engine.service_api import ImageService
from serving.config import ServerConfig
from serving.desk import Desk
from serving.drain import Drain
from serving.errors import ApiError, engine_stopped, no_replica, server_stopping
from serving.keys import KeyRing
from serving.limits import KeyLimits, Queue
from serving.metrics import Metrics
from serving.store import FileStore
from serving.traces import Tracer


class Worker(Protocol):
    """The batch worker as handlers see it."""

    @property
    def running(self) -> Sized: ...

    def wake(self) -> None: ...

    def leave(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ServerState:
    """stopping: set when the server can wait no longer for the requests that still run.

    desk: the job store; None where batch jobs are off. pump: its worker, while the server runs."""

    service: ImageService
    config: ServerConfig
    metrics: Metrics
    files: FileStore
    keys: KeyRing
    queue: Queue
    desk: Desk | None = None
    tracer: Tracer | None = None
    pump: list[Worker] = field(default_factory=list)
    drain: Drain = field(default_factory=Drain)
    key_limits: KeyLimits = field(default_factory=KeyLimits)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    started: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, request: Request) -> "ServerState":
        state: ServerState = request.app.state.bishop
        return state

    def wake(self) -> None:
        """Tell the batch worker that there may be work."""
        for worker in self.pump:
            worker.wake()

    @property
    def jobs(self) -> Desk:
        """Raises ApiError (404) where batch jobs are off."""
        if self.desk is None:
            raise ApiError(404, "batch jobs are off on this server", code="batch_disabled")
        return self.desk

    def require_ready(self) -> None:
        """Raises ApiError (503) when a request would not be drawn."""
        self.require_healthy()
        if self.drain.started:
            raise server_stopping()

    def require_healthy(self) -> None:
        """Raises ApiError (503) when no engine is alive, or its step takes too long."""
        health = self.service.health()
        if not health.alive:
            raise no_replica() if health.replacing else engine_stopped()
        if health.stuck_seconds > self.config.stuck_seconds:
            message = f"the engine's current step has taken {health.stuck_seconds:.0f} s"
            raise ApiError(503, message, code="engine_stuck")
