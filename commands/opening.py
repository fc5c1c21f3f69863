"""Opening an engine from the command line: whatever keeps it from running is one clear line."""

from commands.options import EngineFlags
from commands.refusal import Refusal
from engine.config import EngineConfig
from engine.engine import Engine
from engine.service import EngineService
from engine.service_api import ImageService
from scheduler.request import PolicyChoice


def open_service(flags: EngineFlags, policy: PolicyChoice | None = None) -> ImageService:
    """A loaded engine that is not started yet. Raises Refusal with the reason there is none."""
    try:
        return EngineService(engine_config(flags, policy))
    except (ValueError, RuntimeError, MemoryError, OSError) as error:
        raise Refusal(str(error)) from error


def open_engine(flags: EngineFlags) -> Engine:
    """An engine without a thread, for commands that look inside. Raises Refusal."""
    try:
        return Engine(engine_config(flags))
    except (ValueError, RuntimeError, MemoryError, OSError) as error:
        raise Refusal(str(error)) from error


def engine_config(flags: EngineFlags, policy: PolicyChoice | None = None) -> EngineConfig:
    """Raises ValueError for a value that no engine takes."""
    return EngineConfig(
        model=flags.model,
        load_format=flags.load_format,
        dtype=flags.dtype,
        backend=flags.backend,
        kv_format=flags.kv_format,
        cache_bytes=None if flags.cache_mib is None else flags.cache_mib << 20,
        max_images=flags.max_images,
        threads=flags.threads,
        policy=policy or PolicyChoice(),
    )
