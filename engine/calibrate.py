"""Calibration of attention policies on finished pictures: the files of `indexed` and `stencil`.

python -m engine.calibrate --model mini --pictures pictures.safetensors -o configs/policies/mini
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from engine.models.base import VisualModel
from engine.models.options import LoadOptions
from engine.models.presets import load_model
from engine.policy_files import FOLDER, index_path, stencil_path
from engine.teacher import Pictures, masked_attention, token_loss, whole_mask
from sparse_attn.budget import read_budget
from sparse_attn.calibrate.index import principal_directions
from sparse_attn.calibrate.statistics import (
    LayerStatistics,
    mass_by_offset,
    mass_outside_window,
)
from sparse_attn.calibrate.stencil import fit_stencil, within_reach
from sparse_attn.calibrate.windows import shared_windows
from sparse_attn.geometry import Grid
from sparse_attn.policies.index_file import IndexFile
from sparse_attn.policies.stencil_file import FittedStencil, StencilFile

INDEX_DIMS = 16
SPARSITIES = (0.8, 0.9, 0.95)


Weigh = Literal["mass", "value", "output"]
"""How a key is worth its place: by its attention weight a; by a |v|; or by a |v - o|, how far the
head's output o moves, to first order, when the key is left out. Summed over the keys of a picture
all three are the head's attention mass: how heads share the budget is decided by mass alone, since
the scales of values of different heads mean nothing beside each other."""


class Observer:
    """Dense attention that gathers statistics on its way."""

    def __init__(self, model: VisualModel, grid: Grid, weigh: Weigh = "mass") -> None:
        self.weigh = weigh
        self.layers = [LayerStatistics() for _ in range(model.shape.layers)]
        self._model, self._grid = model, grid
        self._angles: dict[int, tuple[Tensor, Tensor]] = {}

    def _rotary(self, prompt: int) -> tuple[Tensor, Tensor]:
        """Angles of the visual positions behind a prompt of that length."""
        if prompt not in self._angles:
            at = torch.arange(self._grid.tokens - 1)
            behind = torch.full_like(at, prompt)
            self._angles[prompt] = self._model.rotary_visual(at, behind, self._grid)
        return self._angles[prompt]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, prompt: int) -> Tensor:
        n = q.shape[1] - prompt
        mask = whole_mask(torch.ones(1, 1, n, n).tril().bool(), prompt)
        group = q.shape[2] // k.shape[2]
        score = (
            torch.einsum("bthd,bjhd->bhtj", q[:, prompt:], k.repeat_interleave(group, 2))
            * q.shape[-1] ** -0.5
        )
        weights = score.masked_fill(~mask[..., prompt:, :], -torch.inf).softmax(-1)
        visual = weights[..., prompt:]
        worth = visual * self._worth(weights, v.repeat_interleave(group, 2), prompt)
        worth = worth * (visual.sum((2, 3), True) / worth.sum((2, 3), True).clamp_min(1e-30))
        visual = worth.unflatten(1, (-1, group)).sum(2)
        self.layers[layer].add(k[:, prompt:], visual, *self._rotary(prompt))
        return masked_attention(q, k, v, mask)

    def _worth(self, weights: Tensor, v: Tensor, prompt: int) -> Tensor | float:
        """What to multiply the weights [B, Hq, n, n] of visual keys with."""
        if self.weigh == "mass":
            return 1.0
        values = v.transpose(1, 2)
        if self.weigh == "value":
            norms: Tensor = values[:, :, None, prompt:].norm(dim=-1)
            return norms
        away: Tensor = torch.cdist(weights @ values, values[:, :, prompt:])
        return away


def observe(
    model: VisualModel,
    grid: Grid,
    pictures: Pictures,
    batch: int = 8,
    weigh: Weigh = "mass",
    told: Callable[[int, int], None] = lambda *_: None,
) -> list[LayerStatistics]:
    """Statistics of every layer over the pictures. `told(pictures done, pictures in all)`."""
    observer, done = Observer(model, grid, weigh), 0
    for part in pictures.split(batch):
        token_loss(model, grid, part, observer)
        done += len(part)
        told(done, len(pictures))
    return observer.layers


def index_file(
    model: VisualModel, grid: Grid, statistics: Sequence[LayerStatistics], dims: int = INDEX_DIMS
) -> IndexFile:
    """The index of a model whose rotary angles do not depend on the prompt's length."""
    fits = [principal_directions(s.covariance, dims) for s in statistics]
    positions = torch.arange(grid.tokens)
    cos, sin = model.rotary_visual(positions, torch.full_like(positions, model.shape.prompt), grid)
    lost, beside = (
        torch.stack([mass_outside_window(s.mass / s.pictures, grid, row) for s in statistics])
        for row in (False, True)
    )
    return IndexFile(
        model.name, grid,
        torch.stack([s.mean for s in statistics]).float(),
        torch.stack([basis for basis, _ in fits]),
        torch.stack([step for _, step in fits]),
        cos, sin, lost.float(), beside.float(),
    )  # fmt: skip


def stencil_file(
    model: VisualModel,
    grid: Grid,
    statistics: Sequence[LayerStatistics],
    rows: int | None = None,
    sparsities: Sequence[float] = SPARSITIES,
    resident: float | None = None,
) -> StencilFile:
    """Stencils of several sparsities. `rows` is the row bound R of all heads; `resident`, the share
    of the image that may stay on average over the heads, gives each head a reach of its own."""
    mass = torch.stack([s.mass for s in statistics])
    stencils = {s: _stencil(mass, grid, read_budget(grid, s), rows, resident) for s in sparsities}
    shape = model.shape
    return StencilFile(model.name, grid, shape.layers, shape.kv_heads, stencils)


def _stencil(
    mass: Tensor, grid: Grid, budget: int, rows: int | None, resident: float | None = None
) -> FittedStencil:
    """With the first row as anchors, unless that takes more than half of the budget: it holds less
    attention than the best offsets do, but without it pictures repeat themselves downwards."""
    anchors = grid.stride if budget >= 2 * grid.stride else 0
    beside = mass.clone()
    beside[..., :anchors] = 0
    by_offset = torch.stack([mass_by_offset(layer, grid) for layer in beside])
    if resident is not None:
        by_offset = within_reach(by_offset, _reach(beside, grid, resident, anchors), grid)
    return FittedStencil(anchors, fit_stencil(by_offset, budget - anchors, rows))


def _reach(mass: Tensor, grid: Grid, resident: float, anchors: int) -> list[tuple[int, ...]]:
    """How many keys back each head may read. Raises ValueError if the anchors take everything."""
    keys = int(resident * grid.tokens) - anchors
    if keys < 1:
        raise ValueError(
            f"a resident fraction of {resident:g} leaves no key beside the {anchors} anchors on "
            f"{grid}; raise it"
        )
    lost = torch.stack([mass_outside_window(layer, grid, False) for layer in mass])
    return shared_windows(lost, keys, smallest=1)


def main() -> None:
    parser = argparse.ArgumentParser(description="calibrate `indexed` and `stencil` for a model")
    parser.add_argument("--model", default="mini", help="preset or folder of weights")
    parser.add_argument("--name", help="model name to write into the files")
    parser.add_argument("--pictures", type=Path, required=True, help="finished pictures")
    parser.add_argument("-o", "--output", type=Path, default=FOLDER, help="folder for the files")
    parser.add_argument("--rows", type=int, help="row bound R of the stencils")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = load_model(args.model, LoadOptions(backend="reference"))
    model.name = args.name or model.name
    statistics = observe(model, model.grid, Pictures.load(args.pictures))
    args.output.mkdir(parents=True, exist_ok=True)
    index = index_file(model, model.grid, statistics)
    index.save(args.output / index_path(model.name).name)
    stencil = stencil_file(model, model.grid, statistics, args.rows)
    stencil.save(args.output / stencil_path(model.name).name)


if __name__ == "__main__":
    main()
