"""`Placement`: what lives on GPU, CPU and disk; FlexGen calls it `Policy`.

Outside `flexgen_adapter` the word policy alone always means attention.
"""

from dataclasses import dataclass
from typing import Literal

Tier = Literal["gpu", "cpu", "disk"]
TIERS: tuple[Tier, ...] = ("gpu", "cpu", "disk")


@dataclass(frozen=True, slots=True)
class Share:
    """Percent of something on each tier; they add up to 100."""

    gpu: float = 0.0
    cpu: float = 100.0
    disk: float = 0.0

    def __post_init__(self) -> None:
        if min(self.gpu, self.cpu, self.disk) < 0:
            raise ValueError(f"a share must not be negative, got {self}")
        if abs(self.gpu + self.cpu + self.disk - 100) > 1e-6:
            raise ValueError(f"the shares of GPU, CPU and disk must add up to 100, got {self}")

    @classmethod
    def parse(cls, text: str) -> "Share":
        """`0,50,50`: percent on GPU, CPU and disk. Raises ValueError."""
        try:
            gpu, cpu, disk = (float(part) for part in text.split(","))
        except ValueError:
            raise ValueError(
                f"expected three percentages GPU,CPU,DISK such as 0,50,50, got {text!r}"
            ) from None
        return cls(gpu, cpu, disk)

    def __str__(self) -> str:
        return f"{self.gpu:g},{self.cpu:g},{self.disk:g}"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where things live, and how a block of sequences passes through the layers.

    weights, cache, activations: shares of the layers' weights, of the KV cache, of hidden states.
    gpu_batch_size, num_gpu_batches: a block is so many sequences a sub-batch, and so many
        sub-batches, that share one pass over the weights.
    overlap: loads and stores run beside the arithmetic.
    cpu_cache_compute: attention over KV on the CPU is computed there instead of moving the KV.
    compress_weights, compress_cache: what is not on the computing device is kept in 4 bit.
    """

    weights: Share = Share()
    cache: Share = Share()
    activations: Share = Share()
    gpu_batch_size: int = 32
    num_gpu_batches: int = 1
    overlap: bool = True
    cpu_cache_compute: bool = False
    compress_weights: bool = False
    compress_cache: bool = False

    def __post_init__(self) -> None:
        for name in ("gpu_batch_size", "num_gpu_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def block(self) -> int:
        """Sequences that share one pass over the weights."""
        return self.gpu_batch_size * self.num_gpu_batches

    @property
    def uses_disk(self) -> bool:
        return max(self.weights.disk, self.cache.disk, self.activations.disk) > 0
