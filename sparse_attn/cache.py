"""The tensors behind a layout: one layer of the caches of a batch, as kernels see it."""

from dataclasses import dataclass

import torch
from jaxtyping import Int32, Int64, UInt8
from torch import Tensor

from sparse_attn.format import KVFormat
from sparse_attn.layout import CacheLayout


@dataclass(frozen=True, slots=True, eq=False)
class LayerTable:
    """Addresses of one layer, on the device.

    offsets: first entry of each KV head, from the start of the sequence's cache.
    rings: entries of each head's ring.
    index_offsets: first byte of each head's index, from the start of the sequence's cache.
    """

    offsets: Int64[Tensor, "H"]
    rings: Int32[Tensor, "H"]
    prompt: int
    anchors: int
    head_dim: int
    format: KVFormat
    index_offsets: Int64[Tensor, "H"]

    @classmethod
    def of(cls, layout: CacheLayout, layer: int, device: torch.device) -> "LayerTable":
        offsets = torch.tensor(layout.offsets[layer], dtype=torch.int64, device=device)
        rings = torch.tensor(layout.rings[layer], dtype=torch.int32, device=device)
        index = torch.tensor(layout.index_offsets[layer], dtype=torch.int64, device=device)
        return cls(
            offsets, rings, layout.prompt, layout.anchors, layout.head_dim, layout.format, index
        )


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache:
    """One layer of the caches of a batch.

    arena: entries of every sequence, as the format lays them out ([entries, 2, head_dim] of its
        dtype for plain formats). Where the policy has an index, it lies in the same memory.
    """

    arena: Tensor
    table: LayerTable

    @property
    def memory(self) -> UInt8[Tensor, "bytes"]:
        """The arena as bytes."""
        return self.arena.view(torch.uint8).view(-1)
