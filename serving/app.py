"""The application: routes, error shapes and request scope over one `ImageService`."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version

from fastapi import FastAPI

from engine.service_api import ImageService
from scheduler.jobs.store import JobStore
from serving import batches, errors, explain, files, images, info, playground, replicas
from serving.config import ServerConfig
from serving.desk import Desk
from serving.guard import Guard
from serving.keys import KeyRing
from serving.limits import Queue
from serving.metrics import Metrics
from serving.pump import Pump
from serving.scope import RequestScope
from serving.state import ServerState
from serving.store import FileStore
from serving.traces import Traced, Tracer


def create_app(
    service: ImageService, config: ServerConfig | None = None, tracer: Tracer | None = None
) -> FastAPI:
    """The ASGI application. The caller starts the service before and stops it after.

    Raises ValueError or StoreUnavailable if the job store cannot be opened."""
    config = config or ServerConfig()
    state = _state(service, config, tracer)
    app = FastAPI(
        title="Bishop", version=_version(), docs_url=None, redoc_url=None, lifespan=_lifespan
    )
    app.state.bishop = state
    rooms = [images, info, explain, replicas, *((files, batches) if config.jobs else ())]
    for room in rooms:
        app.include_router(room.router)
    playground.install(app)
    errors.install(app)
    app.add_middleware(Guard, state=state)
    if state.tracer is not None:
        app.add_middleware(Traced, tracer=state.tracer)
    app.add_middleware(RequestScope)
    return app


def _state(service: ImageService, config: ServerConfig, tracer: Tracer | None) -> ServerState:
    metrics = Metrics(service)
    return ServerState(
        service,
        config,
        metrics,
        FileStore(config.file_seconds, config.file_bytes),
        KeyRing(config.keys),
        Queue(config.queue_images, metrics.rejected.labels("queue_full").inc),
        Desk(JobStore(config.jobs)) if config.jobs else None,
        tracer,
    )


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Batch work runs while the server does."""
    state: ServerState = app.state.bishop
    if state.desk is None:
        yield
        return
    pump = Pump(state, state.desk)
    state.pump.append(pump)
    await pump.start()
    yield
    state.pump.clear()
    await pump.stop()
    await asyncio.to_thread(state.desk.close)


def _version() -> str:
    try:
        return version("bishop")
    except PackageNotFoundError:
        return "0"
