"""KV formats: how the key and value of one token lie in memory."""

from dataclasses import dataclass
from math import prod

import torch
from jaxtyping import Float, Int64
from torch import Tensor

VECTOR = 16
"""Bytes of one vector load. Entries with scales are padded to it, so that every entry, key and
value starts on such a boundary (head dims that are multiples of 16)."""


@dataclass(frozen=True, slots=True)
class KVFormat:
    """K and V as plain numbers: an entry is [K | V], head_dim of `dtype` each."""

    name: str
    dtype: torch.dtype

    def entry_bytes(self, head_dim: int) -> int:
        return 2 * head_dim * self.dtype.itemsize

    def entry_shape(self, head_dim: int) -> tuple[int, ...]:
        """Shape of one entry of an arena, in `dtype`."""
        return (2, head_dim)

    def view(self, memory: Tensor, head_dim: int) -> Tensor:
        """Bytes as entries [entries, *entry_shape]; a rest too short for an entry is left out."""
        shape = self.entry_shape(head_dim)
        size = prod(shape) * self.dtype.itemsize
        return memory[: len(memory) // size * size].view(self.dtype).view(-1, *shape)

    def empty(self, entries: int, head_dim: int, device: torch.device) -> Tensor:
        """An arena of its own, not initialised."""
        return torch.empty(entries, *self.entry_shape(head_dim), dtype=self.dtype, device=device)

    def write(
        self, arena: Tensor, at: Int64[Tensor, "n"], k: Float[Tensor, "n D"],
        v: Float[Tensor, "n D"],
    ) -> None:  # fmt: skip
        """Store keys and values at entries `at`; the slow reference."""
        arena[at] = torch.stack([k, v], 1).to(arena.dtype)

    def read(self, arena: Tensor, at: Int64[Tensor, "n"], dim: int) -> tuple[Tensor, Tensor]:
        """Keys and values [n, D] of entries `at`, float64."""
        k, v = arena[at].double().unbind(1)
        return k, v

    def round_trip(self, x: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
        """What a key or value reads back as."""
        return x.to(self.dtype).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Int8Format(KVFormat):
    """Eight bits with one fp32 scale per token and head, for K and for V.

    An entry is bytes: [K int8 x D | V int8 x D | scale of K | scale of V | padding to 16].
    A number is code * scale with scale = max |x| / 127; a row of zeros has scale 0.
    """

    name: str = "int8"
    dtype: torch.dtype = torch.uint8

    def entry_bytes(self, head_dim: int) -> int:
        return -(-(2 * head_dim + 8) // VECTOR) * VECTOR

    def entry_shape(self, head_dim: int) -> tuple[int, ...]:
        return (self.entry_bytes(head_dim),)

    def write(
        self, arena: Tensor, at: Int64[Tensor, "n"], k: Float[Tensor, "n D"],
        v: Float[Tensor, "n D"],
    ) -> None:  # fmt: skip
        dim = k.shape[1]
        entry = torch.zeros(len(at), arena.shape[1], dtype=torch.uint8, device=arena.device)
        for i, x in enumerate((k, v)):
            codes, scale = quantize(x)
            entry[:, i * dim : (i + 1) * dim] = codes.view(torch.uint8)
            where = 2 * dim + 4 * i
            entry[:, where : where + 4] = scale[:, None].view(torch.uint8)
        arena[at] = entry

    def read(self, arena: Tensor, at: Int64[Tensor, "n"], dim: int) -> tuple[Tensor, Tensor]:
        entry = arena[at]
        k, v = (
            entry[:, i * dim : (i + 1) * dim].contiguous().view(torch.int8).double()
            * entry[:, 2 * dim + 4 * i :][:, :4].contiguous().view(torch.float32).double()
            for i in range(2)
        )
        return k, v

    def round_trip(self, x: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
        codes, scale = quantize(x)
        return (codes * scale[..., None]).to(x.dtype)


def quantize(x: Float[Tensor, "*n D"]) -> tuple[Tensor, Tensor]:
    """int8 codes [..., D] and fp32 scales [...]; rounds to nearest, ties to even."""
    x = x.float()
    scale = x.abs().amax(-1) / 127
    codes = (x / scale.clamp_min(torch.finfo(torch.float32).tiny)[..., None]).round()
    return codes.clamp(-127, 127).to(torch.int8), scale


FORMATS: dict[str, KVFormat] = {
    format.name: format
    for format in (
        KVFormat("fp32", torch.float32),
        KVFormat("bf16", torch.bfloat16),
        KVFormat("fp16", torch.float16),
        Int8Format(),
    )
}
