"""`window`: the most recent keys; `streaming`: the same behind a few sinks (StreamingLLM)."""

from sparse_attn.budget import anchor_count
from sparse_attn.geometry import Grid
from sparse_attn.policies.static import StaticPolicy
from sparse_attn.policy import Heads, ReadPlan


class Window(StaticPolicy):
    """Read set and resident set: the last n keys, the query's own included, and the anchors.
    A key dies n steps after it was written.

    sparsity: share of the N visual keys that a query never reads; anchors and window together
        are ceil((1 - s) * N) keys, the same for every head.
    anchors: leading keys that are always read, or "first_row".

    Raises ValueError if the anchors leave no key for the window.
    """

    name = "window"

    def __init__(self, grid: Grid, heads: Heads, sparsity: float, anchors: int | str = 0) -> None:
        super().__init__(grid, heads, sparsity, anchors)
        self.recent = self.beside_anchors

    def ring(self, layer: int) -> tuple[int, ...]:
        return (self.recent,) * self.heads.kv_heads

    def layer_plan(self, layer: int) -> ReadPlan:
        return self.uniform(self.recent)

    def read_bound(self) -> int:
        return self.budget


class Streaming(Window):
    """Attention sinks and a window (Xiao et al., "Efficient Streaming Language Models with
    Attention Sinks", section 3.2), on visual keys: the prompt is read anyway.

    sink: leading visual keys that stay for good; they count against the budget.
    Read set, resident set and death as `window` with that many anchors.
    """

    name = "streaming"

    def __init__(
        self,
        grid: Grid,
        heads: Heads,
        sparsity: float,
        sink: int = 4,
        anchors: int | str = 0,
    ) -> None:
        if sink < 1:
            raise ValueError(f"streaming needs at least 1 sink, got {sink}; `window` has none")
        super().__init__(grid, heads, sparsity, max(sink, anchor_count(grid, anchors)))
