"""Stencils from attention mass: the offsets that hold most of it, budgets shared over heads."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_attn.geometry import Grid

Offsets = tuple[tuple[int, int], ...]


def fit_stencil(
    mass: Float[Tensor, "L H R C"], keys: int, rows: int | None = None
) -> tuple[tuple[Offsets, ...], ...]:
    """The offsets (dr, dc) of each layer and head, `keys` on average over all heads, that hold the
    most mass in all; `rows` bounds dr. The query's own key is always among them."""
    layers, heads, height, columns = mass.shape
    weight = mass.clone()
    if rows is not None:
        weight[:, :, rows + 1 :] = 0
    weight[:, :, 0, columns // 2] = torch.inf
    count = min(keys * layers * heads, int((weight > 0).sum()))
    chosen = torch.zeros(weight.numel(), dtype=torch.bool)
    chosen[weight.flatten().topk(count).indices] = True
    picked = chosen.view(layers, heads, height, columns)
    return tuple(tuple(_offsets(picked[i, h]) for h in range(heads)) for i in range(layers))


def within_reach(
    mass: Float[Tensor, "L H R C"], reach: Sequence[Sequence[int]], grid: Grid
) -> Float[Tensor, "L H R C"]:
    """`mass` without the offsets that lie `reach[layer][head]` keys back or more."""
    dr = torch.arange(mass.shape[2])[:, None]
    dc = torch.arange(mass.shape[3]) - mass.shape[3] // 2
    limits = torch.tensor(reach)[..., None, None]
    return mass.masked_fill(dr * grid.stride + dc >= limits, 0)


def _offsets(picked: Tensor) -> Offsets:
    middle = picked.shape[1] // 2
    return tuple((int(dr), int(dc) - middle) for dr, dc in picked.nonzero().tolist())
