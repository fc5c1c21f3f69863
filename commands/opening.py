"""Opening an engine from the command line: whatever keeps it from running is one clear line."""

from commands.options import EngineFlags
from commands.refusal import Refusal
from engine.config import EngineConfig
from engine.offload.config import OffloadConfig
from engine.offload.placement import Placement, Share
from engine.service import EngineService
from engine.service_api import ImageService
from scheduler.request import PolicyChoice


def open_service(flags: EngineFlags, policy: PolicyChoice | None = None) -> ImageService:
    """A loaded engine that is not started yet. Raises Refusal with the reason there is none."""
    try:
        return EngineService(engine_config(flags, policy))
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
        offload=_offload(flags),
    )


def _offload(flags: EngineFlags) -> OffloadConfig:
    limit = flags.host_memory_limit_gb
    return OffloadConfig(
        Placement(
            weights=_share("--weights-placement", flags.weights_placement),
            cache=_share("--kv-placement", flags.kv_placement),
        ),
        flags.offload_dir,
        None if limit is None else int(limit * 1e9),
    )


def _share(flag: str, text: str) -> Share:
    try:
        return Share.parse(text)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None
