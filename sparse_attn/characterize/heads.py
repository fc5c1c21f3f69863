"""What a head looks at, in one word, and whether it is the same elsewhere."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Kind = Literal["prompt/sink", "local", "column", "row", "global"]
KINDS: tuple[Kind, ...] = ("prompt/sink", "local", "column", "row", "global")

NEAR = 2
"""Rows and columns around the query that are local."""
TOP = 32
"""Offsets whose stability is measured."""


def offset_shares(mass: Float[Tensor, "H R C"]) -> dict[str, Float[Tensor, "H"]]:
    """Shares of the visual mass: local (|dr|, |dc| <= 2), column (at most one column aside, farther
    up), row (the same row, farther aside), global (everything else)."""
    height, columns = mass.shape[1:]
    dr = torch.arange(height)[:, None]
    dc = (torch.arange(columns) - columns // 2).abs()[None]
    local = (dr <= NEAR) & (dc <= NEAR)
    column = (dc <= 1) & ~local
    row = (dr == 0) & ~local
    regions = {"local": local, "column": column, "row": row, "global": ~(local | column | row)}
    total = mass.sum((1, 2)).clamp_min(1e-30)
    return {name: mass[:, where].sum(1) / total for name, where in regions.items()}


def classify(
    prompt: Float[Tensor, "H"], sinks: Float[Tensor, "H"], mass: Float[Tensor, "H R C"]
) -> list[Kind]:
    """prompt/sink: more than half of all attention lies on the prompt and the first visual keys;
    otherwise the kind with the largest share of what lies on the picture."""
    shares = offset_shares(mass)
    best = torch.stack([shares[kind] for kind in KINDS[1:]]).argmax(0) + 1
    anchored = (prompt + sinks) > 0.5
    return [
        KINDS[0] if a else KINDS[b] for a, b in zip(anchored.tolist(), best.tolist(), strict=True)
    ]


def overlap(one: Float[Tensor, "H R C"], other: Float[Tensor, "H R C"], top: int = TOP) -> Tensor:
    """Share [H] of the `top` offsets of one half of the data that are also those of the other."""
    count = min(top, one[0].numel())
    first, second = (x.flatten(1).topk(count).indices for x in (one, other))
    return (first[:, :, None] == second[:, None]).any(2).double().mean(1)
