"""`dense`: every head reads every key; nothing is ever evicted."""

import torch
from torch import Tensor

from sparse_attn.policy import ReadPlan, ReadPolicy


class Dense(ReadPolicy):
    """Read set: all keys up to the query. Resident set: the whole image. A key never dies."""

    name = "dense"

    def ring(self, layer: int) -> tuple[int, ...]:
        return (self.grid.tokens - self.anchors,) * self.heads.kv_heads

    def plan(self, layer: int, state: Tensor | None, device: torch.device) -> ReadPlan:
        window = torch.full(
            (self.heads.kv_heads,), self.grid.tokens, dtype=torch.int32, device=device
        )
        return ReadPlan(window, None, self.anchors, self.grid.stride)

    def read_total(self, t: int) -> int:
        return (t + 1) * self.heads.layers * self.heads.kv_heads
