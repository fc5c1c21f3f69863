"""Heat maps of fixed size: over (query, key) and over the offset (dr, dc) from key to query."""

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_attn.characterize.rows import Rows
from sparse_attn.geometry import Grid

BINS = 24
"""Of queries and of keys; at most one per token."""


class BinnedMap:
    """Attention mass from bins of queries to bins of keys; key bin 0 is the prompt.

    sums: [H, bins, 1 + bins], mass summed over the pictures and queries.
    """

    def __init__(self, heads: int, grid: Grid, bins: int = BINS) -> None:
        self.grid, self.bins = grid, min(bins, grid.tokens)
        self.sums = torch.zeros(heads, self.bins, 1 + self.bins, dtype=torch.float64)
        self.queries = torch.zeros(self.bins, dtype=torch.float64)

    def add(self, rows: Rows) -> None:
        query = self._bin(rows.t)
        keys = torch.tensor([1 + self._bin(j) for j in range(rows.t + 1)])
        visual = rows.visual.double().sum(0).cpu()
        self.sums[:, query].index_add_(1, keys, visual)
        self.sums[:, query, 0] += rows.prompt.double().sum((0, 2)).cpu()
        self.queries[query] += len(rows.visual)

    def _bin(self, t: int) -> int:
        return t * self.bins // self.grid.tokens

    def means(self) -> Float[Tensor, "H Q K"]:
        """Mass per query: rows of bins with a query sum to 1."""
        return self.sums / self.queries.clamp_min(1)[:, None]


class OffsetMap:
    """Attention mass by 2-D offset: dr rows up, dc columns aside (dc > 0: the key is to the left).

    sums: [H, height, 2 * stride - 1], column dc + stride - 1.
    """

    def __init__(self, heads: int, grid: Grid) -> None:
        self.grid, self.columns = grid, 2 * grid.stride - 1
        self.sums = torch.zeros(heads, grid.height * self.columns, dtype=torch.float64)
        self.count = 0

    def add(self, rows: Rows, chosen: Tensor | None = None) -> None:
        """chosen: pictures [B] (bool) that count; all by default."""
        visual = rows.visual if chosen is None else rows.visual[chosen]
        if len(visual) == 0:
            return
        self.sums.index_add_(1, self._places(rows.t), visual.double().sum(0).cpu())
        self.count += len(visual)

    def _places(self, t: int) -> Tensor:
        keys = torch.arange(t + 1)
        stride = self.grid.stride
        dr, dc = t // stride - keys // stride, t % stride - keys % stride
        return dr * self.columns + dc + stride - 1

    def means(self) -> Float[Tensor, "H R C"]:
        """Mass per query."""
        return (self.sums / max(1, self.count)).view(-1, self.grid.height, self.columns)
