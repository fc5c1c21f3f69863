"""`lines`: whole rows of the picture, evicted line by line (after LineAR, arXiv 2512.04857)."""

import torch

from sparse_attn.budget import FIRST_ROW
from sparse_attn.geometry import Grid
from sparse_attn.policies.static import StaticPolicy
from sparse_attn.policy import Heads, ReadPlan


class Lines(StaticPolicy):
    """Read set and resident set: the anchors and the last R rows, the query's own row included.
    A row dies as a whole, when the row R below it starts.

    sparsity: gives R, the most rows that fit into ceil((1 - s) * N) keys beside the anchors.
    rows: R itself, instead of the one the sparsity gives.
    anchors: leading keys that are always read; LineAR keeps the first lines.

    Raises ValueError if not even one row fits, or if R rows are more than the sparsity allows.
    """

    name = "lines"

    def __init__(
        self,
        grid: Grid,
        heads: Heads,
        sparsity: float,
        rows: int | None = None,
        anchors: int | str = FIRST_ROW,
    ) -> None:
        super().__init__(grid, heads, sparsity, anchors)
        budget = self.beside_anchors
        fitting = -(-budget // grid.stride) if sparsity == 0 else budget // grid.stride
        self.rows = fitting if rows is None else rows
        if not 1 <= self.rows <= fitting:
            raise ValueError(
                f"sparsity {sparsity} with {self.anchors} anchors leaves {budget} keys, which are "
                f"{fitting} rows of a {grid} grid, and rows = {self.rows}; "
                "it must be at least 1 and fit: lower the sparsity or the anchors"
            )

    def ring(self, layer: int) -> tuple[int, ...]:
        entries = min(self.rows * self.grid.stride, self.grid.tokens - self.anchors)
        return (entries,) * self.heads.kv_heads

    def layer_plan(self, layer: int) -> ReadPlan:
        """Rows above as a window; of the oldest row the part right of the query's column falls
        into that window, and the row edge cuts off what belongs to the row before it."""
        whole = (self.rows - 1) * self.grid.stride
        column = torch.arange(self.grid.stride, dtype=torch.int16)
        edge = torch.stack([column + whole, column], -1)
        windows = torch.full((self.heads.kv_heads,), whole, dtype=torch.int32)
        offsets = edge.expand(1, self.heads.kv_heads, -1, -1).contiguous()
        return ReadPlan(windows, offsets, self.anchors, self.grid.stride)

    def dies_at(self, layer: int, head: int, key: int) -> int:
        if key < self.anchors:
            return self.grid.tokens
        return min((self.grid.row(key) + self.rows) * self.grid.stride, self.grid.tokens)

    def read_bound(self) -> int:
        return min(self.anchors + self.rows * self.grid.stride, self.grid.tokens)
