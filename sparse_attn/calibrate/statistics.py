"""What is gathered while a model attends to finished pictures."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_attn.geometry import Grid
from sparse_attn.index import rotate


@dataclass(eq=False)
class LayerStatistics:
    """Sums over the visual keys and queries of one layer.

    count: keys seen. total [H, D], outer [H, D, D]: sum of k and of k k^T before rotary embedding.
    mass: [H, N, N], attention weight of each (query position, key position), summed over pictures
        and the query heads of a KV head.
    pictures: pictures seen.
    """

    count: int = 0
    pictures: int = 0
    total: Tensor = field(default_factory=lambda: torch.zeros(()))
    outer: Tensor = field(default_factory=lambda: torch.zeros(()))
    mass: Tensor = field(default_factory=lambda: torch.zeros(()))

    def add(
        self,
        k: Float[Tensor, "B N H D"],
        weights: Float[Tensor, "B H N N"],
        cos: Float[Tensor, "N D2"],
        sin: Float[Tensor, "N D2"],
    ) -> None:
        """k: visual keys after rotary embedding; weights: attention among visual positions."""
        raw = rotate(k, cos, -sin).double()
        self.total = self.total + raw.sum((0, 1))
        self.outer = self.outer + torch.einsum("bnhd,bnhe->hde", raw, raw)
        self.mass = self.mass + weights.double().sum(0)
        self.count += raw.shape[0] * raw.shape[1]
        self.pictures += len(k)

    @property
    def mean(self) -> Float[Tensor, "H D"]:
        return self.total / self.count

    @property
    def covariance(self) -> Float[Tensor, "H D D"]:
        return self.outer / self.count - self.mean[:, :, None] * self.mean[:, None]


def mass_by_offset(mass: Float[Tensor, "H N N"], grid: Grid) -> Float[Tensor, "H R C"]:
    """Mass of each 2-D offset (dr, dc), dc from -(stride - 1), summed over the queries."""
    n = mass.shape[-1]
    t = torch.arange(n)
    dr = t[:, None] // grid.stride - t // grid.stride
    dc = t[:, None] % grid.stride - t % grid.stride + grid.stride - 1
    columns = 2 * grid.stride - 1
    causal = t[:, None] >= t
    result = torch.zeros(len(mass), grid.height * columns, dtype=mass.dtype)
    result.index_add_(1, (dr * columns + dc)[causal], mass[:, causal])
    return result.view(len(mass), grid.height, columns)


def mass_outside_window(
    mass: Float[Tensor, "H N N"], grid: Grid, first_row: bool
) -> Float[Tensor, "H W"]:
    """Mass per query on keys farther back than a window of w keys, w = 0..N; with `first_row` the
    keys of that row are left out."""
    n = mass.shape[-1]
    t = torch.arange(n)
    counted = t[:, None] >= t
    if first_row:
        counted = counted & (t >= grid.stride)
    by_offset = torch.zeros(len(mass), grid.tokens + 1, dtype=mass.dtype)
    by_offset.index_add_(1, (t[:, None] - t)[counted], mass[:, counted])
    return by_offset.flip(1).cumsum(1).flip(1) / n
