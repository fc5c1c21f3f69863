"""Opening an engine from the command line: whatever keeps it from running is one clear line."""

import os
from collections.abc import Mapping
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
        return EngineService(engine_config(flags, policy))
    except (ValueError, RuntimeError, MemoryError, OSError) as error:
        raise Refusal(str(error)) from error


def open_engine(flags: EngineFlags) -> Engine:
    """An engine without a thread, for commands that look inside. Raises Refusal."""
    try:
        return Engine(engine_config(flags))
    except (ValueError, RuntimeError, MemoryError, OSError) as error:
        raise Refusal(str(error)) from error


def engine_config(
    flags: EngineFlags, policy: PolicyChoice | None = None, alone: bool = True
) -> EngineConfig:
    """alone: the engine has this machine for itself, so its ranks may divide all of it.

    Raises ValueError for a value that no engine takes."""
    size = flags.tensor_parallel_size
    divided = size if alone else 1
    return EngineConfig(
        model=flags.model,
        load_format=flags.load_format,
        dtype=flags.dtype,
        backend=flags.backend,
        kv_format=flags.kv_format,
        cache_bytes=_rank_cache(flags.cache_mib, size, divided),
        max_images=flags.max_images,
        threads=flags.threads
        or (None if divided == 1 else max((os.cpu_count() or 1) // divided, 1)),
        policy=policy or PolicyChoice(),
        offload=_offload(flags),
        tensor_parallel_size=size,
    )


def _rank_cache(mib: int | None, ranks: int, divided: int) -> int | None:
    """Bytes of one rank's cache; the flag is for all ranks of an engine together."""
    if mib is not None:
        return (mib << 20) // ranks
    return None if divided == 1 else EngineConfig().resolved_cache_bytes // divided


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
        config = _shared(engine_config(flags, policy, alone=False), replicas)
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
    except (ReplicaRefused, ValueError, RuntimeError) as error:
        ray_actor.disconnect()
        raise Refusal(str(error)) from None
    except BaseException:
        ray_actor.disconnect()
        raise
    return router


def _no_room(needs: Mapping[str, int], count: int, room: int) -> str:
    share = " and ".join(f"{number} {name}" for name, number in needs.items())
    return (
        f"--replicas: each needs {share}, so this machine has room for {room}, not {count}; "
        "ask for fewer, for less (--threads), or join a cluster (--ray-address)"
    )


def _shared(config: EngineConfig, replicas: ReplicaFlags) -> EngineConfig:
    """Replicas that share this machine's CPU share its cores and the memory of a cache; those of a
    cluster, or with a GPU each, have what is theirs. config: with what the flags say alone."""
    if replicas.address is not None or config.device.type == "cuda":
        return config if config.threads else replace(config, threads=1)
    cores, ranks = os.cpu_count() or 1, config.tensor_parallel_size
    share = max(cores // (replicas.count * ranks), 1) if replicas.count else 1
    threads = config.threads or share
    count = replicas.count or max(cores // (threads * ranks), 1)
    cache = config.cache_bytes or config.resolved_cache_bytes // (count * ranks)
    return replace(config, threads=threads, cache_bytes=cache)


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
