"""`dense`: every head reads every key; nothing is ever evicted."""

from sparse_attn.geometry import Grid
from sparse_attn.policies.static import StaticPolicy
from sparse_attn.policy import Heads, ReadPlan


class Dense(StaticPolicy):
    """Read set: all keys up to the query. Resident set: the whole image. A key never dies."""

    name = "dense"

    def __init__(self, grid: Grid, heads: Heads, anchors: int | str = 0) -> None:
        super().__init__(grid, heads, 0.0, anchors)

    def ring(self, layer: int) -> tuple[int, ...]:
        return (self.grid.tokens - self.anchors,) * self.heads.kv_heads

    def layer_plan(self, layer: int) -> ReadPlan:
        return self.uniform(self.grid.tokens)

    def read_total(self, t: int) -> int:
        return (t + 1) * self.heads.layers * self.heads.kv_heads
