"""Which part of every layer a rank holds (Megatron-LM, Shoeybi et al. 2019, section 3).

q, k, v and gate, up are split by their outputs, so a rank computes whole heads and whole columns
of the MLP; what comes after them is split by its inputs, and the ranks' results are summed.
Embeddings, norms and the head are whole on every rank. A rank stores and reads the KV of its own
heads alone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch import distributed as dist

from engine.checkpoint import Param, Source
from engine.models.base import ModelShape


@dataclass(frozen=True, slots=True)
class Split:
    """What is divided: query heads, KV heads, their size, and the width of the MLP."""

    q_heads: int
    kv_heads: int
    head_dim: int
    ffn: int

    def check(self, size: int) -> None:
        """Raises ValueError naming the sizes that would do."""
        wide = max(self.q_heads, self.kv_heads)
        fitting = [n for n in range(1, wide + 1) if not any(p % n for p in self._parts)]
        if size not in fitting:
            raise ValueError(
                f"tensor_parallel_size {size} does not divide {self.q_heads} query heads, "
                f"{self.kv_heads} KV heads and {self.ffn} MLP columns; it can be "
                f"{', '.join(map(str, fitting))}"
            )

    @property
    def _parts(self) -> tuple[int, int, int]:
        return self.q_heads, self.kv_heads, self.ffn


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a tensor that stays. rows, columns: None keeps all."""

    rows: tuple[range, ...] | None = None
    columns: range | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """A copy of the part."""
        if self.rows is not None:
            tensor = torch.cat([tensor[r.start : r.stop] for r in self.rows])
        if self.columns is not None:
            tensor = tensor[:, self.columns.start : self.columns.stop]
        return tensor.contiguous()

    def param(self, param: Param) -> Param:
        """The parameter that loads the part alone."""
        if self.rows is not None:
            assert param.rows is None, f"{param.name} is cut already"
            param = replace(param, rows=tuple(i for r in self.rows for i in r))
        if self.columns is not None:
            sources = tuple(_narrowed(source, self.columns) for source in param.sources)
            param = replace(param, sources=sources, tail=(len(self.columns),))
        return param


def _narrowed(source: Source, columns: range) -> Source:
    before = source.convert

    def convert(data: Tensor) -> Tensor:
        data = data if before is None else before(data)
        return data[:, columns.start : columns.stop]

    return replace(source, convert=convert)


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size`. One of one holds everything and sums nothing."""

    rank: int = 0
    size: int = 1

    @property
    def whole(self) -> bool:
        return self.size == 1

    def part(self, count: int, first: int = 0) -> range:
        """This rank's share of `count` things that begin at `first`."""
        each = count // self.size
        return range(first + self.rank * each, first + (self.rank + 1) * each)

    def heads(self, shape: ModelShape) -> ModelShape:
        """The shape of this rank's part of a model."""
        return replace(
            shape,
            q_heads=shape.q_heads // self.size,
            kv_heads=shape.kv_heads // self.size,
            ranks=self.size,
            rank=self.rank,
        )

    def cut(self, name: str, shape: tuple[int, ...], split: Split) -> Cut | None:
        """The part of a tensor; None if this rank holds nothing of it."""
        if self.whole or not name.startswith("layers."):
            return Cut()
        q, kv = split.q_heads * split.head_dim, split.kv_heads * split.head_dim
        match name.split(".", 2)[-1]:
            case "qkv.weight" | "qkv.bias":
                return Cut((self.part(q), self.part(kv, q), self.part(kv, q + kv)))
            case "gate_up.weight" | "gate_up.bias":
                return Cut((self.part(split.ffn), self.part(split.ffn, split.ffn)))
            case "out.weight":
                return Cut(columns=self.part(q))
            case "down.weight":
                return Cut(columns=self.part(split.ffn))
            case "out.bias" | "down.bias":  # added once, to the sum
                return Cut() if self.rank == 0 else None
            case "q_norm.weight" | "q_norm.bias" if len(shape) == 2:  # of each head by itself
                return Cut((self.part(split.q_heads),))
            case "k_norm.weight" | "k_norm.bias" if len(shape) == 2:
                return Cut((self.part(split.kv_heads),))
        return Cut()

    def params(self, params: Iterable[Param], split: Split) -> list[Param]:
        """What this rank loads."""
        found = [(p, self.cut(p.name, p.shape, split)) for p in params]
        return [cut.param(p) for p, cut in found if cut is not None]

    def tensors(self, tensors: dict[str, Tensor], split: Split) -> dict[str, Tensor]:
        """The same of tensors that are whole."""
        found = {name: self.cut(name, tuple(t.shape), split) for name, t in tensors.items()}
        return {
            name: tensors[name] if cut == Cut() else cut.of(tensors[name])
            for name, cut in found.items()
            if cut is not None
        }

    def sum(self, x: Tensor) -> Tensor:
        """The sum of what all ranks computed, the same bits on every one."""
        if self.size <= 2:
            if not self.whole:
                dist.all_reduce(x)
            return x
        # A ring adds an element in an order that depends on where it lies, so on the batch.
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return in_order(parts)


def in_order(parts: Sequence[Tensor]) -> Tensor:
    """The sum of the ranks' parts, in the order of the ranks."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


WHOLE = Shard()
