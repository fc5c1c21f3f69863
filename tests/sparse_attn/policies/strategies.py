"""Random policies on random grids."""

from contextlib import suppress
from typing import Any

import torch
from hypothesis import strategies as st

from sparse_attn import policies
from sparse_attn.geometry import Grid
from sparse_attn.policy import Batch, Heads, ReadPolicy

NAMES = sorted(policies.POLICIES)

grids = st.builds(Grid, st.integers(2, 7), st.integers(3, 7), st.sampled_from([0, 1]))
heads = st.builds(Heads, st.integers(1, 2), st.integers(1, 3))


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
    return result


@st.composite
def any_policy(draw: st.DrawFn, sparsity: float | None = None) -> ReadPolicy:
    """A policy that can be built, of any name."""
    grid, name = draw(grids), draw(st.sampled_from(NAMES))
    s = draw(st.floats(0, 0.97)) if sparsity is None else sparsity
    s = 0.0 if name == "dense" else s
    shape = draw(heads)
    for density, settings in (
        (s, draw(options(name, grid, sparsity is None))),
        (min(s, 0.5), {}),
        (0.0, {}),
    ):
        with suppress(ValueError):
            return policies.build(name, grid, shape, density, settings)
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
    policy: ReadPolicy, upto: int, seed: int, state: torch.Tensor | None = None, start: int = 0
) -> torch.Tensor | None:
    """The state of one sequence after `upto` steps with random attention weights; `state`, where
    given, is that after `start` steps and changes in place."""
    state = policy.new_state(1, torch.device("cpu")) if state is None else state
    for t in range(start, upto):
        generator = torch.Generator().manual_seed(1000 * seed + t)
        for layer in range(policy.heads.layers):
            batch = batch_of([t])
            shape = (1, policy.heads.kv_heads, policy.grid.tokens)
            weights = torch.rand(shape, generator=generator)
            weights = weights.round(decimals=1) * policy.reads(layer, state, batch)
            policy.update(layer, state, batch, weights)
    return state
