"""Opening an engine from the command line: whatever keeps it from running is one clear line."""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

from commands.options import EngineFlags
from commands.refusal import Refusal
from engine.config import EngineConfig
from engine.engine import Engine
from engine.offload.config import OffloadConfig
from engine.offload.placement import Placement, Share
from engine.service import EngineService
from engine.service_api import ImageService
from scheduler.request import PolicyChoice


def open_service(flags: EngineFlags, policy: PolicyChoice | None = None) -> ImageService:
    """A loaded engine that is not started yet. Raises Refusal with the reason there is none."""
    try:
        return EngineService(_alone(engine_config(flags, policy)))
    except (ValueError, RuntimeError, MemoryError, OSError) as error:
        raise Refusal(str(error)) from error


def open_engine(flags: EngineFlags) -> Engine:
    """An engine without a thread, for commands that look inside. Raises Refusal."""
    try:
        return Engine(_alone(engine_config(flags)))
    except (ValueError, RuntimeError, MemoryError, OSError) as error:
        raise Refusal(str(error)) from error


def engine_config(flags: EngineFlags, policy: PolicyChoice | None = None) -> EngineConfig:
    """What the flags say. Raises ValueError for a value that no engine takes."""
    size, mib = flags.tensor_parallel_size, flags.cache_mib
    return EngineConfig(
        model=flags.model,
        load_format=flags.load_format,
        dtype=flags.dtype,
        backend=flags.backend,
        kv_format=flags.kv_format,
        cache_bytes=None if mib is None else (mib << 20) // size,
        max_images=flags.max_images,
        threads=flags.threads,
        policy=policy or PolicyChoice(),
        offload=_offload(flags),
        tensor_parallel_size=size,
    )


def _alone(config: EngineConfig) -> EngineConfig:
    """For an engine that has this machine for itself: its ranks divide all of it."""
    return config if config.tensor_parallel_size == 1 else _divided(config, 1)


def _divided(config: EngineConfig, engines: int) -> EngineConfig:
    """For one of several engines on this machine's CPU: their ranks divide its cores and the memory
    of a cache, where `config` does not say."""
    processes = engines * config.tensor_parallel_size
    return replace(
        config,
        threads=config.threads or max((os.cpu_count() or 1) // processes, 1),
        cache_bytes=config.cache_bytes or config.resolved_cache_bytes // processes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFlags:
    """What the command line says of replicas. count: None is as many as there is room for.
    address: of a Ray that runs; None starts one on this machine."""

    count: int | None
    address: str | None = None
    silent_seconds: float = 10.0
    stuck_seconds: float = 60.0

    @classmethod
    def of(cls, count: str, address: str | None, silent: float, stuck: float) -> "ReplicaFlags":
        """Raises Refusal for a count that is none."""
        if count != "auto" and not (count.isdecimal() and int(count) >= 1):
            raise Refusal(f"--replicas: expected a number above 0, or auto, got {count!r}")
        number = None if count == "auto" else int(count)
        return cls(count=number, address=address, silent_seconds=silent, stuck_seconds=stuck)


def open_fleet(
    flags: EngineFlags, replicas: ReplicaFlags, policy: PolicyChoice | None = None
) -> ImageService:
    """Several engines on Ray, of which the first is ready. Raises Refusal."""
    try:
        from engine.replicas import ray_actor
    except ImportError as error:
        message = f"--replicas needs Ray ({error}): pip install 'bishop-serve[ray]'"
        raise Refusal(message) from None
    from engine.replicas.replica import ReplicaRefused
    from engine.replicas.router import Router, RouterConfig

    try:
        with ExitStack() as undo:
            undo.callback(ray_actor.disconnect)
            config = _shared(engine_config(flags, policy), replicas)
            ray_actor.connect(replicas.address)
            spawn = ray_actor.RaySpawn(config, replicas.silent_seconds)
            room = spawn.room()
            if replicas.address is None and (replicas.count or 1) > room:
                raise Refusal(_no_room(spawn.needs, replicas.count or 1, room))
            router = Router(
                spawn,
                replicas.count or max(room, 1),
                RouterConfig(stuck_seconds=replicas.stuck_seconds),
                ray_actor.disconnect,
            )
            router.start()
            undo.pop_all()
    except (ReplicaRefused, ValueError, RuntimeError) as error:
        raise Refusal(str(error)) from None
    return router


def _no_room(needs: Mapping[str, int], count: int, room: int) -> str:
    share = " and ".join(f"{number} {name}" for name, number in needs.items())
    return (
        f"--replicas: each needs {share}, so this machine has room for {room}, not {count}; "
        "ask for fewer, for less (--threads), or join a cluster (--ray-address)"
    )


def _shared(config: EngineConfig, replicas: ReplicaFlags) -> EngineConfig:
    """Replicas that share this machine's CPU divide it; those of a cluster, or with a GPU each,
    have what is theirs."""
    elsewhere = replicas.address is not None or config.device.type == "cuda"
    if elsewhere or replicas.count is None:
        config = replace(config, threads=config.threads or 1)
    if elsewhere:
        return config
    fitting = (os.cpu_count() or 1) // ((config.threads or 1) * config.tensor_parallel_size)
    return _divided(config, replicas.count or max(fitting, 1))


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
