"""The ceiling first: what this machine's memory and arithmetic allow for a model and a batch."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from engine.events import ImageStats
from engine.layers import Linear
from engine.models.base import VisualModel
from sparse_attn.layout import KVFormat

READ_BYTES = 256 << 20
"""Much larger than a last-level cache, so that reading it is reading memory."""

MATMUL = 1024
REPEATS = 5


@dataclass(frozen=True, slots=True)
class Ceiling:
    """bandwidth: bytes/s read from memory. flops: fp32 operations/s of a matrix product."""

    bandwidth: float
    flops: float

    def or_better(self, other: "Ceiling") -> "Ceiling":
        """The higher of two measurements: a busy moment lowers one, nothing raises it."""
        return Ceiling(max(self.bandwidth, other.bandwidth), max(self.flops, other.flops))

    def __str__(self) -> str:
        return (
            f"memory read {self.bandwidth / 1e9:.1f} GB/s, matmul {self.flops / 1e9:.0f} GFLOP/s "
            f"(fp32, {torch.get_num_threads()} threads)"
        )


@dataclass(frozen=True, slots=True)
class StepCost:
    """The least that one decode step of a batch reads (bytes) and computes (operations)."""

    images: int
    weight_bytes: int
    kv_bytes: float
    flops: float

    @classmethod
    def of(
        cls, model: VisualModel, format: KVFormat, stats: ImageStats, images: int, sequences: int
    ) -> "StepCost":
        """stats: what one such image read. sequences: two for each image with guidance."""
        layers = list(linears(model))
        weights = sum(layer.inputs * layer.outputs for layer in layers)
        kv_bytes = images * stats.kv_read_bytes / stats.tokens
        # Each number of an entry (K and V) is used once per query head of its group: a multiply
        # and an add.
        entries = kv_bytes / format.entry_bytes(model.shape.head_dim)
        attention = 2 * entries * 2 * model.shape.head_dim * _group(model)
        flops = 2 * weights * sequences + attention
        return cls(images, sum(layer.nbytes for layer in layers), kv_bytes, flops)

    def tokens_per_second(self, ceiling: Ceiling) -> float:
        return self.images / max(self._memory(ceiling), self.flops / ceiling.flops)

    def bound(self, ceiling: Ceiling) -> str:
        """Which of the two is the slower: "memory" or "arithmetic"."""
        return "memory" if self._memory(ceiling) > self.flops / ceiling.flops else "arithmetic"

    def _memory(self, ceiling: Ceiling) -> float:
        return (self.weight_bytes + self.kv_bytes) / ceiling.bandwidth


def _group(model: VisualModel) -> int:
    return model.shape.q_heads // model.shape.kv_heads


def linears(part: object) -> Iterator[Linear]:
    """Every linear layer of a decoder; its pixel decoder is a torch module and is left out."""
    if isinstance(part, Linear):
        yield part
    elif isinstance(part, list | tuple):
        for item in part:
            yield from linears(item)
    elif _is_decoder_part(part):
        yield from linears(list(vars(part).values()))


def _is_decoder_part(part: object) -> bool:
    ours = type(part).__module__.startswith("engine.models")
    return ours and hasattr(part, "__dict__") and not isinstance(part, torch.nn.Module)


def measure() -> Ceiling:
    """The best of a few runs of each, on the threads torch uses now."""
    data = torch.ones(READ_BYTES // 4)
    a, b = torch.rand(MATMUL, MATMUL), torch.rand(MATMUL, MATMUL)
    read, product = _best(data.sum), _best(lambda: a @ b)
    return Ceiling(READ_BYTES / read, 2 * MATMUL**3 / product)


def _best(run: Callable[[], object]) -> float:
    run()
    return min(_timed(run) for _ in range(REPEATS))


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
