"""Do queries d steps apart read the same keys (vertical) or keys shifted by d (diagonal)?

Cosine similarity of the attention of query t and of query t - d among the visual keys. Vertical
compares key by key; diagonal compares key j of query t with key j - d of query t - d. The measure
behind the stripes of arXiv 2609.19702.
"""

from collections import deque

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import cosine_similarity

from sparse_attn.characterize.rows import Rows
from sparse_attn.geometry import Grid

KINDS = ("vertical", "diagonal", "vertical_shuffled", "diagonal_shuffled")


def distances_for(grid: Grid) -> tuple[int, ...]:
    """Small distances, and those around one and two rows."""
    near = {1, 2, 4, 8, grid.stride - 1, grid.stride, grid.stride + 1, 2 * grid.stride}
    return tuple(sorted(d for d in near if 0 < d < grid.tokens - 1))


class Similarity:
    """sums: [kinds, distances, H]. Holds the last max(distances) rows of the pictures at hand.

    The control: keys are put into the order of one fixed permutation of all positions before they
    are compared. It keeps every weight and destroys the raster, so a diagonal similarity that
    survives it has nothing to do with the picture's geometry. Vertical similarity cannot change.
    """

    def __init__(self, heads: int, grid: Grid, distances: tuple[int, ...] | None = None) -> None:
        self.grid, self.distances = grid, distances or distances_for(grid)
        shape = (len(KINDS), len(self.distances), heads)
        self.sums = torch.zeros(shape, dtype=torch.float64)
        self.counts = torch.zeros(len(self.distances), dtype=torch.float64)
        self._last: deque[Tensor] = deque(maxlen=max(self.distances))
        self.order = shuffled_order(grid)

    def add(self, rows: Rows) -> None:
        if rows.t == 0:
            self._last.clear()
        row = torch.zeros(*rows.visual.shape[:2], self.grid.tokens)
        row[..., : rows.t + 1] = rows.visual.cpu()
        for i, d in enumerate(self.distances):
            if d <= len(self._last):
                self.sums[:, i] += self._compare(row, self._last[-d], d)
                self.counts[i] += len(row)
        self._last.append(row)

    def _compare(self, row: Tensor, before: Tensor, d: int) -> Float[Tensor, "kinds H"]:
        mixed, mixed_before = row[..., self.order], before[..., self.order]
        pairs = (
            (row, before), (row[..., d:], before[..., :-d]),
            (mixed, mixed_before), (mixed[..., d:], mixed_before[..., :-d]),
        )  # fmt: skip
        return torch.stack([cosine_similarity(a, b, -1).double().sum(0) for a, b in pairs])

    def means(self) -> Float[Tensor, "kinds distances H"]:
        return self.sums / self.counts.clamp_min(1)[:, None]


def shuffled_order(grid: Grid) -> Int64[Tensor, "N"]:
    """The permutation of the control, always the same."""
    return torch.randperm(grid.tokens, generator=torch.Generator().manual_seed(0))
