"""Opening an engine from the command line: whatever keeps it from running is one clear line."""

from commands.options import Backend
from commands.refusal import Refusal
from engine.config import EngineConfig
from engine.service import EngineService
from engine.service_api import ImageService
from scheduler.request import PolicyChoice


def open_service(
    model: str,
    backend: Backend,
    threads: int | None,
    cache_mib: int | None = None,
    max_images: int = 16,
    policy: PolicyChoice | None = None,
) -> ImageService:
    """A loaded engine that is not started yet. Raises Refusal with the reason there is none."""
    try:
        config = EngineConfig(
            model=model,
            backend=backend,
            threads=threads,
            cache_bytes=None if cache_mib is None else cache_mib << 20,
            max_images=max_images,
            policy=policy or PolicyChoice(),
        )
        return EngineService(config)
    except (ValueError, RuntimeError, MemoryError, OSError) as error:
        raise Refusal(str(error)) from error
