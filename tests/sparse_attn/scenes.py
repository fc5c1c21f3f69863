"""Random caches and read plans: every feature of `ReadPlan` at once, with all keys written."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparse_attn import reference
from sparse_attn.cache import LayerCache, LayerTable
from sparse_attn.geometry import Grid
from sparse_attn.layout import FORMATS, CacheLayout
from sparse_attn.policy import UNUSED, Batch, ReadPlan

CPU = torch.device("cpu")


@dataclass
class Scene:
    """One layer of some sequences in mid-image, and a query for each."""

    cache: LayerCache
    batch: Batch
    plan: ReadPlan
    q: Tensor
    scale: float

    def only(self, rows: list[int]) -> "Scene":
        """The same with some of the sequences, in the given order."""
        at = torch.tensor(rows)
        b = self.batch
        batch = Batch(b.slots[at], b.positions[at], b.prompts[at], b.rows[at])
        return replace(self, batch=batch, q=self.q[at])


@dataclass
class Shape:
    """Sizes of a random scene. `strided`: the offsets are a layer of a state of several layers."""

    grid: Grid = Grid(5, 7, 1)
    batch: int = 4
    kv_heads: int = 3
    group: int = 2
    dim: int = 20
    prompt: int = 5
    anchors: int = 0
    places: int = 6
    shared: bool = False
    strided: bool = False
    format: str = "fp32"


def scene(shape: Shape, seed: int) -> Scene:
    g = torch.Generator().manual_seed(seed)
    layout = _layout(shape, g)
    cache = _empty_cache(shape, layout)
    batch = _batch(shape, layout, g)
    _write(shape, cache, batch, g)
    q = torch.randn(shape.batch, shape.kv_heads * shape.group, shape.dim, generator=g)
    return Scene(cache, batch, _plan(shape, layout, g), q, shape.dim**-0.5)


def _layout(shape: Shape, g: torch.Generator) -> CacheLayout:
    """Two layers whose heads have rings of different sizes, so that some wrap around."""
    most = shape.grid.tokens - shape.anchors
    rings = torch.randint(shape.places + 4, most + 1, (2, shape.kv_heads), generator=g).tolist()
    return CacheLayout(
        shape.prompt, shape.anchors, tuple(map(tuple, rings)), shape.dim, FORMATS[shape.format]
    )


def _empty_cache(shape: Shape, layout: CacheLayout) -> LayerCache:
    """Memory that holds NaN wherever nothing was written."""
    arena = layout.format.empty(layout.entries * shape.batch, shape.dim, CPU)
    arena.view(torch.uint8).fill_(255)
    return LayerCache(arena, LayerTable.of(layout, 1, CPU))


def _batch(shape: Shape, layout: CacheLayout, g: torch.Generator) -> Batch:
    """Sequences at unlike positions with unlike prompts, their slots and rows out of order."""
    n = shape.batch
    positions = torch.randint(0, shape.grid.tokens, (n,), generator=g, dtype=torch.int32)
    prompts = torch.randint(0, shape.prompt + 1, (n,), generator=g, dtype=torch.int32)
    slots = torch.randperm(n, generator=g) * layout.entries
    return Batch(slots, positions, prompts, torch.randperm(n, generator=g))


def _write(shape: Shape, cache: LayerCache, batch: Batch, g: torch.Generator) -> None:
    for b, (t, prompt) in enumerate(
        zip(batch.positions.tolist(), batch.prompts.tolist(), strict=True)
    ):
        k, v = torch.randn(2, prompt + t + 1, shape.kv_heads, shape.dim, generator=g)
        reference.append_prompt(k[:prompt], v[:prompt], cache, int(batch.slots[b]))
        for j in range(t + 1):
            one = replace(batch, slots=batch.slots[b : b + 1], positions=torch.tensor([j]).int())
            reference.append(k[prompt + j][None], v[prompt + j][None], cache, one)


def _plan(shape: Shape, layout: CacheLayout, g: torch.Generator) -> ReadPlan:
    """Per head a window and, beyond it, offsets that its ring still holds, some places unused."""
    rings = torch.tensor(layout.rings[1])
    window = (torch.rand(shape.kv_heads, generator=g) * (rings - shape.places)).int()
    rows = 1 if shape.shared else shape.batch
    layers = 3 if shape.strided else 1
    state = torch.empty(rows, layers, shape.kv_heads, shape.places, 2, dtype=torch.int16)
    state[..., 0], state[..., 1] = UNUSED, 0
    for r in range(rows):
        for h in range(shape.kv_heads):
            table = state[r, layers - 1, h]
            choice = torch.randperm(int(rings[h] - window[h]), generator=g)[: shape.places]
            table[:, 0] = (choice + window[h]).short()
            table[:, 1] = torch.randint(-2, 3, (shape.places,), generator=g).short()
            table[torch.rand(shape.places, generator=g) < 0.2] = torch.tensor([UNUSED, 0]).short()
    return ReadPlan(window, state[:, layers - 1], shape.anchors, shape.grid.stride)
