"""Everything that is gathered of one layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparse_attn.characterize.heads import classify, offset_shares, overlap
from sparse_attn.characterize.maps import BinnedMap, OffsetMap
from sparse_attn.characterize.regions import Regions
from sparse_attn.characterize.rows import Rows
from sparse_attn.characterize.similarity import KINDS, Similarity
from sparse_attn.geometry import Grid

SPLITS = ("prompts", "seeds", "steps")


@dataclass(frozen=True, slots=True)
class Labels:
    """Which half of the prompts and of the seeds each picture of a batch belongs to, 0 or 1."""

    prompts: Sequence[int]
    seeds: Sequence[int]


class LayerCharacter:
    """Sums of one layer; their size does not depend on how many pictures are drawn."""

    def __init__(self, heads: int, grid: Grid) -> None:
        self.grid = grid
        self.regions = Regions(heads)
        self.binned = BinnedMap(heads, grid)
        self.offsets = OffsetMap(heads, grid)
        self.similarity = Similarity(heads, grid)
        self.halves = {name: (OffsetMap(heads, grid), OffsetMap(heads, grid)) for name in SPLITS}

    def add(self, rows: Rows, labels: Labels) -> None:
        self.regions.add(rows)
        self.binned.add(rows)
        self.offsets.add(rows)
        self.similarity.add(rows)
        late = int(2 * rows.t >= self.grid.tokens)
        self.halves["steps"][late].add(rows)
        for name, side in (("prompts", labels.prompts), ("seeds", labels.seeds)):
            chosen = torch.tensor(side, dtype=torch.bool)
            self.halves[name][0].add(rows, ~chosen)
            self.halves[name][1].add(rows, chosen)

    def heads(self) -> list[dict[str, Any]]:
        """One flat row per head."""
        means, mass = self.regions.means(), self.offsets.means()
        columns: dict[str, Any] = {name: value.tolist() for name, value in means.items()}
        columns |= {f"share_{k}": v.tolist() for k, v in offset_shares(mass).items()}
        columns |= {f"stable_{n}": stability(*pair) for n, pair in self.halves.items()}
        columns["kind"] = list(classify(means["prompt"], means["sinks"], mass))
        count = len(columns["kind"])
        return [{name: values[h] for name, values in columns.items()} for h in range(count)]

    def similarities(self) -> list[dict[str, float]]:
        """One row per distance, means over the heads."""
        means: Tensor = self.similarity.means().mean(-1)
        return [
            {"distance": d} | {kind: float(means[k, i]) for k, kind in enumerate(KINDS)}
            for i, d in enumerate(self.similarity.distances)
            if self.similarity.counts[i] > 0
        ]


def stability(one: OffsetMap, other: OffsetMap) -> list[float | None]:
    """None where one half of the data is empty."""
    heads = len(one.sums)
    if not (one.count and other.count):
        return [None] * heads
    return [float(x) for x in overlap(one.means(), other.means())]
