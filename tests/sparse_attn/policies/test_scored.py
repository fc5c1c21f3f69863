"""Eviction by scores: who goes, checked on weights made for it."""

import pytest
import torch

from sparse_attn import attention, policies
from sparse_attn.cache import LayerCache, LayerTable
from sparse_attn.geometry import Grid
from sparse_attn.layout import FORMATS, CacheLayout
from sparse_attn.policy import Heads, ReadPolicy
from tests.sparse_attn.policies.strategies import batch_of

CPU = torch.device("cpu")
GRID = Grid(4, 4)


def kept(policy: ReadPolicy, weights: dict[int, list[float]], steps: int) -> list[int]:
    """Keys of head 0 after `steps`; weights: key -> its attention weight at each step."""
    state = policy.new_state(1, CPU)
    for t in range(steps):
        w = torch.zeros(1, policy.heads.kv_heads, GRID.tokens)
        for key, values in weights.items():
            w[0, :, key] = values[t] if t < len(values) else 0.0
        policy.update(0, state, batch_of([t]), w)
    return policy.resident(0, 0, steps, state, 0)


def test_h2o_keeps_the_recent_half_and_the_heavy() -> None:
    policy = policies.build("h2o", GRID, Heads(1, 1), 0.75)
    assert kept(policy, {1: [0, 1, 0.1, 0.1, 0.1], 3: [0, 0, 0, 0.5]}, 7) == [1, 3, 6, 7]


def test_decay_lets_h2o_forget() -> None:
    weights = {1: [0.0, 1.0], 3: [0, 0, 0, 0.7], 4: [0, 0, 0, 0, 0.6]}
    plain = policies.build("h2o", GRID, Heads(1, 1), 0.75)
    fading = policies.build("h2o", GRID, Heads(1, 1), 0.75, {"decay": 0.5})
    assert kept(plain, weights, 9)[:2] == [1, 3]
    assert kept(fading, weights, 9)[:2] == [3, 4]


def test_tova_looks_at_the_last_query_of_all_heads() -> None:
    policy = policies.build("tova", GRID, Heads(1, 2), 0.75)
    state = policy.new_state(1, CPU)
    for t in range(4):
        w = torch.full((1, 2, GRID.tokens), 0.2)
        w[0, 0, 2], w[0, 1, 2] = 0.3, 0.0
        policy.update(0, state, batch_of([t]), w)
    for head in range(2):
        assert policy.resident(0, head, 4, state, 0) == [0, 1, 3, 4]


def test_alisa_sees_no_farther_than_its_horizon() -> None:
    weights = {0: [5.0, 5.0], 1: [0, 0, 0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]}
    short = policies.build("alisa", GRID, Heads(1, 1), 0.75, {"horizon": 2})
    long = policies.build("alisa", GRID, Heads(1, 1), 0.75, {"horizon": 16})
    assert 0 not in kept(short, weights, 8)
    assert 0 in kept(long, weights, 8)
    assert 1 in kept(short, weights, 8)


def test_the_native_backend_says_that_these_are_for_study() -> None:
    policy = policies.build("h2o", GRID, Heads(1, 1), 0.75)
    layout = CacheLayout.of(policy, 0, 4, FORMATS["fp32"])
    cache = LayerCache(torch.zeros(layout.entries, 2, 4), LayerTable.of(layout, 0, CPU))
    plan, x = policy.plan(0, policy.new_state(1, CPU), CPU), torch.zeros(1, 1, 4)
    with pytest.raises(RuntimeError, match="for study"):
        attention.append(x, x, cache, batch_of([0]), plan=plan)
    with pytest.raises(RuntimeError, match="for study"):
        attention.decode(x, cache, policy, plan, batch_of([0]), 1.0, layer=0)
