"""What the handlers of one server share."""

import asyncio
import time
from dataclasses import dataclass, field

from fastapi import Request

from engine.service_api import ImageService
from serving.config import ServerConfig
from serving.errors import ApiError, engine_stopped
from serving.metrics import Metrics
from serving.store import FileStore


@dataclass(frozen=True, slots=True)
class ServerState:
    """stopping: set when the server can wait no longer for the requests that still run."""

    service: ImageService
    config: ServerConfig
    metrics: Metrics
    files: FileStore
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    started: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, request: Request) -> "ServerState":
        state: ServerState = request.app.state.bishop
        return state

    def require_healthy(self) -> None:
        """Raises ApiError (503) when the engine's thread is dead, or its step takes too long."""
        health = self.service.health()
        if not health.alive:
            raise engine_stopped()
        if health.stuck_seconds > self.config.stuck_seconds:
            message = f"the engine's current step has taken {health.stuck_seconds:.0f} s"
            raise ApiError(503, message, code="engine_stuck")
