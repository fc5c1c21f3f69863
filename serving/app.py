"""The application: routes, error shapes and request scope over one `ImageService`."""

from importlib.metadata import PackageNotFoundError, version

from fastapi import FastAPI

from engine.service_api import ImageService
from serving import errors, images, info
from serving.config import ServerConfig
from serving.metrics import Metrics
from serving.scope import RequestScope
from serving.state import ServerState
from serving.store import FileStore


def create_app(service: ImageService, config: ServerConfig | None = None) -> FastAPI:
    """The ASGI application. The caller starts the service before and stops it after."""
    config = config or ServerConfig()
    app = FastAPI(title="Bishop", version=_version(), docs_url=None, redoc_url=None)
    files = FileStore(config.file_seconds, config.file_bytes)
    app.state.bishop = ServerState(service, config, Metrics(service), files)
    app.include_router(images.router)
    app.include_router(info.router)
    errors.install(app)
    app.add_middleware(RequestScope)
    return app


def _version() -> str:
    try:
        return version("bishop")
    except PackageNotFoundError:
        return "0"
