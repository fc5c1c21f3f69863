"""`stencil`: a static set of 2-D offsets per layer and head, with row-edge masking."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from sparse_attn.budget import anchor_count
from sparse_attn.geometry import Grid
from sparse_attn.policies.static import StaticPolicy
from sparse_attn.policies.stencil_file import FittedStencil, StencilError, StencilFile
from sparse_attn.policy import UNUSED, Heads, ReadPlan

DEFAULT_ROWS = 8
"""Rows above the query that the built-in stencil reaches into: they hold most of the mass that
a fixed offset can catch."""


@dataclass(frozen=True)
class HeadStencil:
    """What one head reads: the last `window` keys, and keys at 2-D offsets (dr, dc) upwards.

    Offsets that fall into the window are dropped, so that no key is read twice.
    """

    window: int
    offsets: frozenset[tuple[int, int]]
    stride: int
    places: tuple[tuple[int, int], ...] = field(init=False)

    def __post_init__(self) -> None:
        linear = ((dr * self.stride + dc, dc) for dr, dc in self.offsets)
        places = tuple(sorted(p for p in linear if p[0] >= max(self.window, 0)))
        object.__setattr__(self, "places", places)

    @property
    def size(self) -> int:
        """Keys read at most."""
        return self.window + len(self.places)

    @property
    def reach(self) -> int:
        """Keys that must be stored: the largest linear offset, and the query's own."""
        return max([self.window, 1, *(linear + 1 for linear, _ in self.places)])

    @property
    def rows(self) -> int:
        """R: nothing older than R rows is read."""
        by_window = -(-(self.window - 1) // self.stride) if self.window else 0
        return max([by_window, *(dr for dr, _ in self.offsets)])


class Stencil(StaticPolicy):
    """Read set: the anchors, and per head a fixed set of offsets; one that crosses the edge of
    its row is left out for that query. Resident set: per head the anchors and as many recent keys
    as its largest offset reaches back. A key dies when it is farther back than that.

    sparsity: the reads of all heads of the model, anchors included, are at most ceil((1 - s) * N)
        on average over the heads; from a file, one head may read more and another less.
    rows: row bound R; None means no bound but what the stencil itself has.
    anchors: leading keys that are always read, or "first_row"; a file brings its own.
    file: YAML file of calibrated stencils (`stencil_file`); the default is built in, the same for
        all heads: {1..k} and {m * stride +- r}, m = 1..R, fitted to the sparsity.
    model: name of the model, which must be the file's.

    Raises ValueError for R = 0 and for a budget that leaves no key, StencilError (a ValueError)
    for a file of another model, grid or sparsity.
    """

    name = "stencil"

    def __init__(
        self,
        grid: Grid,
        heads: Heads,
        sparsity: float,
        rows: int | None = None,
        anchors: int | str | None = None,
        file: str | None = None,
        model: str | None = None,
    ) -> None:
        fitted = None if file is None else _fitted(Path(file), model, grid, heads, sparsity)
        if fitted is not None:
            if anchors is not None and anchor_count(grid, anchors) != fitted.anchors:
                raise StencilError(
                    f"{file} was made for {fitted.anchors} anchors at sparsity {sparsity:g}, not "
                    f"{anchors!r}: leave `anchors` out or calibrate again"
                )
            anchors = fitted.anchors
        super().__init__(grid, heads, sparsity, anchors or 0)
        if rows is not None and rows < 1:
            raise ValueError(f"stencil needs a row bound R of at least 1, got {rows}")
        budget = self.beside_anchors
        if fitted is None:
            everything = rows is None and budget == grid.tokens - self.anchors
            one = (
                HeadStencil(budget, frozenset(), grid.stride)
                if everything
                else default_stencil(grid, budget, rows)
            )
            self.stencils: Sequence[Sequence[HeadStencil]] = [[one] * heads.kv_heads] * heads.layers
        else:
            self.stencils = _heads_of(fitted, grid, rows)
            self._check_budget(file, budget)

    def of_heads(self, first: int, count: int) -> Self:
        part = super().of_heads(first, count)
        part.stencils = [layer[first : first + count] for layer in self.stencils]
        return part

    def _check_budget(self, file: str | None, budget: int) -> None:
        sizes = [s.size for layer in self.stencils for s in layer]
        if sum(sizes) > budget * len(sizes):
            raise StencilError(
                f"{file} reads {sum(sizes) / len(sizes):.1f} keys a head beside the anchors, more "
                f"than the {budget} its sparsity allows: calibrate again"
            )

    def ring(self, layer: int) -> tuple[int, ...]:
        most = self.grid.tokens - self.anchors
        return tuple(min(s.reach, most) for s in self.stencils[layer])

    def layer_plan(self, layer: int) -> ReadPlan:
        stencils = self.stencils[layer]
        windows = torch.tensor([s.window for s in stencils], dtype=torch.int32)
        return ReadPlan(windows, _table(stencils), self.anchors, self.grid.stride)

    def read_bound(self) -> int:
        largest = max(s.size for layer in self.stencils for s in layer)
        return min(self.anchors + largest, self.grid.tokens)


def default_stencil(grid: Grid, budget: int, rows: int | None) -> HeadStencil:
    """{1..k} u {m * stride +- r}: half the budget goes to the rows above (at most half a row to
    each side, so that rows do not meet), the rest to the window."""
    bands = min(grid.height - 1, rows or DEFAULT_ROWS, budget // 2)
    spread = min((budget // 2 // bands - 1) // 2, (grid.stride - 1) // 2) if bands else 0
    above = frozenset((m, dc) for m in range(1, bands + 1) for dc in range(-spread, spread + 1))
    most = min(budget, grid.tokens if rows is None else rows * grid.stride + 1)

    def size(window: int) -> int:
        return HeadStencil(window, above, grid.stride).size

    window = bisect_right(range(most + 1), budget, key=size) - 1
    return HeadStencil(window, above, grid.stride)


def _fitted(
    path: Path, model: str | None, grid: Grid, heads: Heads, sparsity: float
) -> FittedStencil:
    file = StencilFile.load(path)
    file.check(model, grid, heads)
    return file.of(sparsity)


def _heads_of(fitted: FittedStencil, grid: Grid, rows: int | None) -> list[list[HeadStencil]]:
    heads = [
        [HeadStencil(0, frozenset(offsets), grid.stride) for offsets in layer]
        for layer in fitted.layers
    ]
    deepest = max(s.rows for layer in heads for s in layer)
    if rows is not None and deepest > rows:
        raise StencilError(
            f"the stencil file reads {deepest} rows back, more than the bound of {rows}: "
            "raise `rows` or calibrate with that bound"
        )
    return heads


def _table(stencils: Sequence[HeadStencil]) -> Tensor | None:
    most = max(len(s.places) for s in stencils)
    if most == 0:
        return None
    unused = [(UNUSED, 0)]
    rows = [[*s.places, *unused * (most - len(s.places))] for s in stencils]
    return torch.tensor(rows, dtype=torch.int16)[None]
