"""The tensors behind a layout: one layer of the caches of a batch, as kernels see it."""

from dataclasses import dataclass

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

from sparse_attn.layout import CacheLayout


@dataclass(frozen=True, slots=True, eq=False)
class LayerTable:
    """Addresses of one layer: entry offset and ring size of each KV head, on the device."""

    offsets: Int64[Tensor, "H"]
    rings: Int32[Tensor, "H"]
    prompt: int
    anchors: int
    head_dim: int

    @classmethod
    def of(cls, layout: CacheLayout, layer: int, device: torch.device) -> "LayerTable":
        offsets = torch.tensor(layout.offsets[layer], dtype=torch.int64, device=device)
        rings = torch.tensor(layout.rings[layer], dtype=torch.int32, device=device)
        return cls(offsets, rings, layout.prompt, layout.anchors, layout.head_dim)


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache:
    """One layer of the caches of a batch: `arena` [entries, 2, head_dim] holds every sequence."""

    arena: Tensor
    table: LayerTable
