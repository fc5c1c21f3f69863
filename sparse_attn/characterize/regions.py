"""Where attention falls: prompt, local, middle, and what that takes in keys."""

from dataclasses import dataclass
from math import ceil

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_attn.characterize.rows import MASSES, Rows, density_for, entropy

LOCAL_SHARE = 0.1
"""Of the decoded tokens, the most recent: "local" in arXiv 2609.19702; the rest is "middle"."""
SINKS = 4
NAMES = ("prompt", "local", "middle", "sinks", "entropy", *(f"density_{m:g}" for m in MASSES))


def region_values(rows: Rows) -> Float[Tensor, "V H"]:
    """NAMES of each head, summed over the pictures.

    sinks: mass on the first SINKS visual keys, which also count as local or middle. density_m: the
    share of all keys, prompt included, that holds m of the mass if chosen anew for each query.
    """
    local = ceil(LOCAL_SHARE * (rows.t + 1))
    recent = rows.visual[..., -local:].sum(-1)
    values = [
        rows.prompt.sum(-1),
        recent,
        rows.visual.sum(-1) - recent,
        rows.visual[..., :SINKS].sum(-1),
        entropy(rows.all),
        *(density_for(rows.all, m) for m in MASSES),
    ]
    return torch.stack([v.double().sum(0) for v in values])


@dataclass(eq=False)
class Regions:
    """Means of NAMES over all queries of all pictures. sums: [V, H]."""

    heads: int
    count: int = 0

    def __post_init__(self) -> None:
        self.sums = torch.zeros(len(NAMES), self.heads, dtype=torch.float64)

    def add(self, rows: Rows) -> None:
        self.sums += region_values(rows).cpu()
        self.count += len(rows.visual)

    def means(self) -> dict[str, Float[Tensor, "H"]]:
        return dict(zip(NAMES, self.sums / max(1, self.count), strict=True))
