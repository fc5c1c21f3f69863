"""What an engine is told about offloading."""

from dataclasses import dataclass
from pathlib import Path

from engine.offload.placement import Placement


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """placement: what lives where.
    directory: where the disk's part is kept; needed if there is one.
    host_memory_limit: bytes of host memory that weights, KV and buffers may take; None: no limit.
    staging_bytes: of each of the two buffers through which KV on disk passes; None: as many
        sequences of a sub-batch as fit in 64 MiB, at least one.
    """

    placement: Placement = Placement()
    directory: Path | None = None
    host_memory_limit: int | None = None
    staging_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("host_memory_limit", "staging_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be positive, got {value}")
