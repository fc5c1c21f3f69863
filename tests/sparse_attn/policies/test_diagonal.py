"""`diagonal` against the paper's own words: skip sets of positions, three phases, literally."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_attn.geometry import Grid
from sparse_attn.policies.diagonal import Diagonal
from sparse_attn.policy import Heads
from tests.sparse_attn.policies.strategies import batch_of


@dataclass
class PaperHead:
    """One head of arXiv 2609.19702: W_t = the last N_r positions, S_t = skip set, I_t = W_t - S_t.

    Positions are the paper's: with sinks they count from the first key behind them.
    """

    n_att: int
    n_r: int
    skip: set[int] = field(default_factory=set)
    stored: set[int] = field(default_factory=set)

    def attend(self, t: int) -> set[int]:
        """I_t: what the query at position t reads."""
        self.stored.add(t)
        if t >= self.n_att - 1:
            self.skip = {j + 1 for j in self.skip}
        if t >= self.n_r:
            self.stored.remove(t - self.n_r)
        return {j for j in range(max(0, t - self.n_r + 1), t + 1) if j not in self.skip}

    def learn(self, t: int, weight: dict[int, float]) -> None:
        """Phase 2: the weakest key of I_t joins the skip set for the next step."""
        if self.n_att - 1 <= t < self.n_r and len(self.skip) < self.n_r - self.n_att:
            self.skip.add(min(weight, key=lambda j: (weight[j], j)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Diagonal, int]:
    grid = draw(st.builds(Grid, st.integers(2, 7), st.integers(3, 7), st.sampled_from([0, 1])))
    reads = draw(st.integers(2, grid.tokens))
    sink = draw(st.integers(0, min(4, reads - 1)))
    recent = draw(st.integers(reads - sink, grid.tokens - sink))
    heads = Heads(draw(st.integers(1, 2)), draw(st.integers(1, 3)))
    policy = Diagonal(grid, heads, 1 - reads / grid.tokens, recent=recent, sink=sink)
    return policy, draw(st.integers(0, 9))


def steps(policy: Diagonal, seed: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Position, state before the step, and attention weights [H, N] of layer 0; some are equal."""
    state = policy.new_state(1, torch.device("cpu"))
    g = torch.Generator().manual_seed(seed)
    for t in range(policy.grid.tokens):
        batch = batch_of([t])
        weights = torch.rand(1, policy.heads.kv_heads, policy.grid.tokens, generator=g)
        weights = weights.round(decimals=1) * policy.reads(0, state, batch)
        yield t, state, weights[0]
        policy.update(0, state, batch, weights)


@given(cases())
def test_reads_and_residents_are_the_papers(case: tuple[Diagonal, int]) -> None:
    policy, seed = case
    sink = policy.anchors
    heads = [PaperHead(policy.kept, policy.recent) for _ in range(policy.heads.kv_heads)]
    for t, state, weights in steps(policy, seed):
        reads = policy.reads(0, state, batch_of([t]))[0]
        for h, paper in enumerate(heads):
            sinks = set(range(min(sink, t + 1)))
            if t < sink:
                assert set(reads[h].nonzero()[:, 0].tolist()) == sinks
                continue
            attended = paper.attend(t - sink)
            expected = sinks | {j + sink for j in attended}
            assert set(reads[h].nonzero()[:, 0].tolist()) == expected
            stored = sinks | {j + sink for j in paper.stored}
            assert set(policy.resident(0, h, t, state)) == stored
            assert expected <= stored
            paper.learn(t - sink, {j: float(weights[h, j + sink]) for j in attended})


@given(cases())
def test_after_the_second_phase_the_offsets_stay(case: tuple[Diagonal, int]) -> None:
    policy, seed = case
    fixed = None
    for t, state, _ in steps(policy, seed):
        if t >= policy.selecting[1]:
            fixed = state.clone() if fixed is None else fixed
            assert torch.equal(state, fixed)
            assert len(set(state[0, 0, 0, :, 0].tolist())) == policy.kept


@given(cases())
def test_a_smaller_window_keeps_less(case: tuple[Diagonal, int]) -> None:
    policy, _ = case
    if policy.recent == policy.kept:
        return
    smaller = Diagonal(
        policy.grid, policy.heads, policy.sparsity, recent=policy.recent - 1, sink=policy.anchors
    )
    assert sum(smaller.ring(0)) == sum(policy.ring(0)) - policy.heads.kv_heads
    last = policy.grid.tokens - 1
    assert set(smaller.resident(0, 0, last)) < set(policy.resident(0, 0, last))
