"""The compiled `append` and `decode` against the reference, bit by bit where bits are promised."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sparse_attn import attention, ops, reference
from sparse_attn.cache import LayerCache, LayerTable
from sparse_attn.geometry import Grid
from sparse_attn.layout import FORMATS, CacheLayout
from sparse_attn.policies.diagonal import Diagonal
from sparse_attn.policy import Batch, Heads
from tests.sparse_attn.scenes import CPU, Scene, Shape, scene

pytestmark = pytest.mark.usefixtures("native", "poisoned")

SHAPES = {
    "plain": Shape(),
    "anchors": Shape(anchors=3),
    "no row tokens": Shape(grid=Grid(6, 6)),
    "one head": Shape(kv_heads=1, group=1),
    "group of 7": Shape(kv_heads=2, group=7),
    "one table for all": Shape(shared=True),
    "a layer of a state": Shape(strided=True, anchors=2),
    "no offsets": Shape(places=0),
    "no prompt": Shape(prompt=0),
    "long": Shape(grid=Grid(12, 12), places=40, prompt=50, batch=2),
    "head dim 64": Shape(dim=64),
    "head dim 100": Shape(dim=100),
    "head dim 128": Shape(dim=128),
    "bf16": Shape(format="bf16", dim=64),
    "bf16, odd dim": Shape(format="bf16", dim=36),
    "fp16": Shape(format="fp16", dim=100),
    "several tiles": Shape(grid=Grid(16, 16), places=150, prompt=50, batch=2, dim=64),
    "int8": Shape(format="int8", dim=64, anchors=2),
    "int8, odd dim": Shape(format="int8", dim=20, group=7, kv_heads=2),
    "int8, head dim 100": Shape(format="int8", dim=100, group=1),
}


def decode(s: Scene) -> Tensor:
    return ops.decode(s.q, s.cache, s.plan, s.batch, s.scale)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SHAPES)
def test_decode_is_the_reference(name: str, seed: int) -> None:
    s = scene(SHAPES[name], seed)
    expected = reference.decode(s.q, s.cache, s.plan, s.batch, s.scale)
    torch.testing.assert_close(decode(s), expected, rtol=2e-5, atol=2e-6)


def test_large_scores_do_not_overflow() -> None:
    s = scene(Shape(), 0)
    s.q = s.q * 300
    expected = reference.decode(s.q, s.cache, s.plan, s.batch, s.scale)
    torch.testing.assert_close(decode(s), expected, rtol=1e-3, atol=1e-4)


def test_a_broken_key_shows() -> None:
    s = scene(Shape(places=0, prompt=2), 0)
    s.batch = replace(s.batch, prompts=torch.full_like(s.batch.prompts, 2))
    s.cache.arena[:] = torch.nan
    assert decode(s).isnan().all()


@pytest.mark.parametrize("name", ["plain", "anchors", "bf16", "int8", "head dim 100", "group of 7"])
def test_a_sequence_does_not_depend_on_its_batch(name: str, threads: int) -> None:
    s = scene(replace(SHAPES[name], batch=16), threads)
    alone = torch.cat([decode(s.only([i])) for i in range(16)])
    for size in range(2, 17):
        rows = torch.randperm(16)[:size].tolist()
        assert torch.equal(decode(s.only(rows)), alone[rows])


def test_a_result_does_not_depend_on_the_threads() -> None:
    s = scene(replace(SHAPES["long"], batch=5), 1)
    before = torch.get_num_threads()
    results = []
    for n in (1, 2, 3):
        torch.set_num_threads(n)
        results.append(decode(s))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def fresh(shape: Shape, seed: int) -> tuple[Scene, Tensor, Tensor]:
    s = scene(shape, seed)
    k, v = torch.randn(2, shape.batch, shape.kv_heads, shape.dim)
    return s, k, v


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["plain", "anchors", "bf16", "fp16", "int8", "no prompt"])
def test_append_is_the_reference(name: str, seed: int) -> None:
    s, k, v = fresh(SHAPES[name], seed)
    expected = LayerCache(s.cache.arena.clone(), s.cache.table)
    reference.append(k, v, expected, s.batch)
    ops.append(k, v, s.cache, s.batch)
    assert torch.equal(s.cache.arena.view(torch.uint8), expected.arena.view(torch.uint8))


@pytest.mark.parametrize("format", ["bf16", "fp16"])
def test_append_rounds_as_torch_does(format: str) -> None:
    """Ties, subnormals, overflow, infinities and NaN included."""
    s, k, v = fresh(replace(SHAPES[format], batch=8, kv_heads=8), 0)
    scale = torch.randint(-40, 40, k.shape, generator=torch.Generator().manual_seed(0))
    k = torch.ldexp(k.bfloat16().float() + torch.randint(-2, 3, k.shape) * 2**-9, scale)
    k[0, 0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])
    v[0, 0, :4] = torch.tensor([65504.0, 65519.9, 65520.0, 2.0**-25])
    expected = LayerCache(s.cache.arena.clone(), s.cache.table)
    reference.append(k, v, expected, s.batch)
    ops.append(k, v, s.cache, s.batch)
    torch.testing.assert_close(s.cache.arena, expected.arena, rtol=0, atol=0, equal_nan=True)


def test_queries_keys_and_values_may_be_slices_of_one_projection() -> None:
    shape = SHAPES["plain"]
    s, _, _ = fresh(shape, 0)
    heads = shape.kv_heads * shape.group
    qkv = torch.randn(shape.batch, heads + 2 * shape.kv_heads, shape.dim)
    q, k, v = qkv.split((heads, shape.kv_heads, shape.kv_heads), 1)
    expected = LayerCache(s.cache.arena.clone(), s.cache.table)
    ops.append(k, v, s.cache, s.batch)
    ops.append(k.contiguous(), v.contiguous(), expected, s.batch)
    assert torch.equal(s.cache.arena.nan_to_num(7), expected.arena.nan_to_num(7))
    assert torch.equal(decode(replace(s, q=q)), decode(replace(s, q=q.contiguous())))


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("sink", [0, 3])
@pytest.mark.parametrize("recent", [None, 12, 40])
def test_decode_select_learns_what_the_policy_learns(
    group: int, sink: int, recent: int | None
) -> None:
    """Whole images on both backends, two sequences one step apart: states equal at every step."""
    grid, heads, dim = Grid(5, 7, 1), Heads(2, 3), 32
    policy = Diagonal(grid, heads, 0.75, recent=recent, sink=sink)
    shape = Shape(grid=grid, batch=2, kv_heads=3, group=group, dim=dim, anchors=sink)
    native, slow = whole_image(policy, shape, "native"), whole_image(policy, shape, "reference")
    for (out, state), (expected, expected_state) in zip(native, slow, strict=True):
        assert torch.equal(state, expected_state)
        torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-6)


def whole_image(
    policy: Diagonal, shape: Shape, backend: attention.Backend
) -> list[tuple[Tensor, Tensor]]:
    """Output and state after each step of layer 1 of an image, drawn from the same numbers."""
    g = torch.Generator().manual_seed(7)
    layout = CacheLayout.of(policy, 4, shape.dim, FORMATS["fp32"])
    arena = torch.full((2 * layout.entries, 2, shape.dim), torch.nan)
    cache, state = LayerCache(arena, LayerTable.of(layout, 1, CPU)), policy.new_state(2, CPU)
    slots, prompts = torch.tensor([0, layout.entries]), torch.tensor([4, 2]).int()
    for slot, length in zip(slots.tolist(), prompts.tolist(), strict=True):
        k, v = torch.randn(2, length, shape.kv_heads, shape.dim, generator=g)
        reference.append_prompt(k, v, cache, slot)
    steps = []
    for t in range(shape.grid.tokens):
        at = torch.tensor([t, max(t - 1, 0)]).int()
        batch = Batch(slots, at, prompts, torch.tensor([1, 0]))
        q = torch.randn(2, shape.kv_heads * shape.group, shape.dim, generator=g)
        k, v = torch.randn(2, 2, shape.kv_heads, shape.dim, generator=g)
        plan = policy.plan(1, state, CPU)
        attention.append(k, v, cache, batch, backend, plan=plan)
        out = attention.decode(
            q, cache, policy, plan, batch, 0.2, layer=1, state=state, backend=backend
        )
        steps.append((out, state.clone()))
    return steps


def test_ties_drop_the_farthest_key() -> None:
    """Equal keys have equal weights: of those the oldest goes, as in the reference."""
    policy = Diagonal(Grid(4, 4), Heads(1, 1), 0.5)
    layout = CacheLayout.of(policy, 0, 4, FORMATS["fp32"])
    cache = LayerCache(torch.ones(layout.entries, 2, 4), LayerTable.of(layout, 0, CPU))
    state = policy.new_state(1, CPU)
    state[:] = state.flip(-2)
    zero = torch.zeros(1, dtype=torch.int64)
    t = policy.selecting[0]
    batch = Batch(zero, torch.tensor([t]).int(), zero.int(), zero)
    ops.decode(torch.ones(1, 1, 4), cache, policy.plan(0, state, CPU), batch, 1.0)
    assert sorted(state[0, 0, 0, :, 0].tolist()) == [*range(t), t + 1]
