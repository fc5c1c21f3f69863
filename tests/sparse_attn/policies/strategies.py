"""Random policies on random grids."""

from contextlib import suppress
from typing import Any

import torch
from hypothesis import strategies as st

from sparse_attn import policies
from sparse_attn.geometry import Grid
from sparse_attn.policies.index_file import IndexFile
from sparse_attn.policies.indexed import Indexed
from sparse_attn.policy import Batch, Heads, ReadPolicy

NAMES = sorted(policies.POLICIES)

grids = st.builds(Grid, st.integers(2, 7), st.integers(3, 7), st.sampled_from([0, 1]))
heads = st.builds(Heads, st.integers(1, 2), st.integers(1, 3))


DIM = 4
MODEL = "random"


def random_index(grid: Grid, heads: Heads, dim: int = DIM, seed: int = 0) -> IndexFile:
    """An index of `dim` x 2 directions for random keys, with 2-D rotary angles."""
    g = torch.Generator().manual_seed(seed)
    shape = (heads.layers, heads.kv_heads)
    basis = torch.linalg.qr(torch.randn(*shape, 16, 16, generator=g, dtype=torch.float64))[0]
    t = torch.arange(grid.tokens)
    quarter = torch.arange(max(1, dim // 4)) + 1.0
    angle = torch.cat(
        [(t // grid.stride)[:, None] / quarter, (t % grid.stride)[:, None] / quarter], 1
    )
    lost = torch.rand(2, *shape, grid.tokens + 1, generator=g).sort(-1, descending=True).values
    lost[..., -1] = 0
    return IndexFile(
        MODEL, grid, torch.randn(*shape, dim, generator=g) / 4, basis[:, :, :dim].float(),
        torch.full((*shape, 16), 0.3), angle.cos()[:, : dim // 2], angle.sin()[:, : dim // 2],
        lost[0], lost[1] * 0.7,
    )  # fmt: skip


@st.composite
def options(draw: st.DrawFn, name: str, grid: Grid, bounded: bool) -> dict[str, Any]:
    """Options of a policy by name, not all of which it can do; `bounded`: a row bound too."""
    result: dict[str, Any] = {}
    known = policies.options_of(name)
    if "anchors" in known and draw(st.booleans()):
        result["anchors"] = draw(st.one_of(st.integers(0, 2 * grid.stride), st.just("first_row")))
    if "rows" in known and bounded and draw(st.booleans()):
        result["rows"] = draw(st.integers(1, grid.height))
    if "recent" in known and draw(st.booleans()):
        result["recent"] = draw(st.integers(1, grid.tokens))
    if "sink" in known and draw(st.booleans()):
        result["sink"] = draw(st.integers(1, 5))
    if "resident" in known:
        result["resident"] = draw(st.floats(0.2, 1.0)) if bounded else 1.0
        result["rerank"] = draw(st.booleans())
        result["dims"] = draw(st.sampled_from([8, 16]))
        result["share"] = draw(st.sampled_from([1, 2, 3]))
    return result


@st.composite
def any_policy(draw: st.DrawFn, sparsity: float | None = None) -> ReadPolicy:
    """A policy that can be built, of any name."""
    grid, name = draw(grids), draw(st.sampled_from(NAMES))
    s = draw(st.floats(0, 0.97)) if sparsity is None else sparsity
    s = 0.0 if name == "dense" else s
    shape = draw(heads)
    given: dict[str, Any] = {"file": random_index(grid, shape)} if name == "indexed" else {}
    for density, settings in (
        (s, draw(options(name, grid, sparsity is None))),
        (min(s, 0.5), {}),
        (0.0, {}),
    ):
        with suppress(ValueError):
            return policies.build(name, grid, shape, density, given | settings, MODEL)
    raise AssertionError(f"{name} cannot be built on {grid} even at density 1")


def batch_of(positions: list[int], prompts: list[int] | None = None, slot: int = 0) -> Batch:
    """Sequences at the given positions, each with a row of its own and `slot` entries."""
    rows = torch.arange(len(positions))
    prompts = [0] * len(positions) if prompts is None else prompts
    return Batch(
        rows * slot, torch.tensor(positions, dtype=torch.int32),
        torch.tensor(prompts, dtype=torch.int32), rows,
    )  # fmt: skip


def learnt_state(
    policy: ReadPolicy,
    upto: int,
    seed: int,
    state: torch.Tensor | None = None,
    start: int = 0,
    layer: int = 0,
) -> torch.Tensor | None:
    """The state of one sequence after `upto` steps with random attention weights; `state`, where
    given, is that after `start` steps and changes in place. Where keys are picked anew for every
    layer, that of `layer` at position `upto`."""
    state = policy.new_state(1, torch.device("cpu")) if state is None else state
    if isinstance(policy, Indexed):
        return _picked_at_random(policy, layer, max(0, upto), seed)
    for t in range(start, upto):
        generator = torch.Generator().manual_seed(1000 * seed + t)
        for i in range(policy.heads.layers):
            batch = batch_of([t])
            shape = (1, policy.heads.kv_heads, policy.grid.tokens)
            weights = torch.rand(shape, generator=generator)
            weights = weights.round(decimals=1) * policy.reads(i, state, batch)
            policy.update(i, state, batch, weights)
    return state


def _picked_at_random(policy: Indexed, layer: int, t: int, seed: int) -> torch.Tensor:
    """What `index_select` may write for a layer at position t: any stored keys that are older
    than the recent ones, fewer than the picks where there are no more."""
    g = torch.Generator().manual_seed(seed)
    state = policy.new_state(1, torch.device("cpu"))
    for first in range(0, policy.heads.kv_heads, policy.share):
        sharers = range(first, first + policy.share)
        stored = set.intersection(*(set(policy.resident(layer, h, t)) for h in sharers))
        keys = torch.tensor([j for j in sorted(stored) if j <= t - policy.recent], dtype=torch.long)
        keys = keys[torch.randperm(len(keys), generator=g)][: policy.picks]
        state[0, first : first + policy.share, : len(keys), 0] = (t - keys).short()
    return state
