"""Picking keys by an index: the compiled operator against the reference, and the index itself."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparse_attn import index_reference, ops, policies, reference
from sparse_attn.cache import LayerCache, LayerTable
from sparse_attn.geometry import Grid
from sparse_attn.index import LEVELS, Pick, best, row_pairs
from sparse_attn.layout import FORMATS, CacheLayout
from sparse_attn.policies.indexed import Indexed
from sparse_attn.policy import UNUSED, Batch, Heads, ReadPlan
from tests.sparse_attn.policies.strategies import MODEL, random_index

CPU = torch.device("cpu")
GRID, DIM, GROUP, PROMPT = Grid(6, 5, 1), 16, 2, 3
HEADS = Heads(1, 4)
OPTIONS: dict[str, dict[str, object]] = {
    "8 dims": {},
    "16 dims": {"dims": 16},
    "re-ranked": {"rerank": True},
    "shared by 2": {"share": 2},
    "shared, re-ranked": {"share": 4, "rerank": True},
    "evicting": {"resident": 0.6},
    "evicting, first row": {"resident": 0.7, "anchors": "first_row", "recent": 3},
}


@dataclass
class Scene:
    """Sequences in mid-image whose keys are all written and indexed, and queries."""

    policy: Indexed
    cache: LayerCache
    batch: Batch
    plan: ReadPlan
    pick: Pick
    q: Tensor

    def only(self, i: int) -> "Scene":
        b = self.batch
        one = slice(i, i + 1)
        batch = Batch(b.slots[one], b.positions[one], b.prompts[one], b.rows[one])
        return replace(self, batch=batch, q=self.q[one])


def scene(options: dict[str, object], format: str = "fp32", seed: int = 0, batch: int = 3) -> Scene:
    g = torch.Generator().manual_seed(seed)
    file = random_index(GRID, HEADS, DIM, seed)
    policy = policies.build("indexed", GRID, HEADS, 0.7, {"file": file} | options, MODEL)
    assert isinstance(policy, Indexed)
    layout = CacheLayout.of(policy, PROMPT, DIM, FORMATS[format])
    per = layout.bytes // FORMATS[format].entry_bytes(DIM) + 1
    size = per * FORMATS[format].entry_bytes(DIM)
    memory = torch.full((size * batch,), 255, dtype=torch.uint8)
    cache = LayerCache(layout.format.view(memory, DIM), LayerTable.of(layout, 0, CPU))
    rows = torch.randperm(batch, generator=g)
    positions = torch.randint(GRID.tokens // 2, GRID.tokens, (batch,), generator=g)
    prompts = torch.full((batch,), PROMPT, dtype=torch.int32)
    where = Batch(torch.arange(batch) * per, positions.int(), prompts, rows)
    state = policy.new_state(batch, CPU)
    plan, pick = policy.plan(0, state, CPU), policy.pick(0, CPU, DIM**-0.5)
    k, v = torch.randn(2, GRID.tokens, batch, HEADS.kv_heads, DIM, generator=g)
    for t in range(GRID.tokens):
        due = (positions >= t).nonzero()[:, 0]
        part = Batch(where.slots[due], torch.full_like(due, t).int(), prompts[due], rows[due])
        reference.append(k[t, due], v[t, due], cache, part)
        index_reference.write_index(cache, plan, part, pick.index)
    q = torch.randn(batch, HEADS.kv_heads * GROUP, DIM, generator=g)
    return Scene(policy, cache, where, plan, pick, q)


def picked(s: Scene, native: bool) -> tuple[Tensor, Tensor]:
    """Offsets [B, H, picks] and the memory after `index_select`."""
    assert s.plan.offsets is not None
    select = ops.index_select if native else index_reference.index_select
    select(s.q, s.cache, s.plan, s.batch, s.pick)
    return s.plan.offsets[s.batch.rows, :, :, 0].clone(), s.cache.memory.clone()


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("format", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_operator_is_the_reference(name: str, format: str, seed: int) -> None:
    """Random scores have no ties, so the picks are the same, in the same order."""
    expected, memory = picked(scene(OPTIONS[name], format, seed), native=False)
    s = scene(OPTIONS[name], format, seed)
    offsets, written = picked(s, native=True)
    assert torch.equal(offsets, expected)
    assert torch.equal(written, memory)


@pytest.mark.usefixtures("native")
def test_ties_go_to_the_newest_key() -> None:
    s = scene({"resident": 0.6, "anchors": 2})
    s.q = torch.zeros_like(s.q)
    for native in (True, False):
        offsets, _ = picked(s, native)
        want = torch.arange(1, s.policy.picks + 1)
        most = torch.tensor(s.policy.rings[0]).amin()
        near = want < most
        assert (offsets[..., near] == want[near]).all(), native


@pytest.mark.usefixtures("native")
def test_a_sequence_does_not_depend_on_its_batch_or_the_threads(threads: int) -> None:
    s = scene({"rerank": True, "share": 2}, seed=threads, batch=8)
    together, _ = picked(s, native=True)
    alone = torch.cat([picked(s.only(i), native=True)[0] for i in range(8)])
    assert torch.equal(together, alone)


@pytest.mark.usefixtures("native")
def test_broken_queries_pick_stored_keys() -> None:
    s = scene({"resident": 0.6})
    s.q[:] = torch.nan
    offsets, _ = picked(s, native=True)
    rings = torch.tensor(s.policy.rings[0])[None, :, None]
    used = offsets != UNUSED
    stored = torch.minimum(rings[..., 0], s.batch.positions[:, None] + 1)
    assert torch.equal(used.sum(-1), (stored - 1).clamp_max(s.policy.picks))
    assert (offsets >= 1).all()
    assert ((offsets < rings) | ~used).all()


@pytest.mark.usefixtures("native")
def test_few_keys_leave_places_unused() -> None:
    s = scene({})
    s.batch = replace(s.batch, positions=torch.tensor([0, 1, 3], dtype=torch.int32))
    for native in (True, False):
        offsets, _ = picked(s, native)
        assert ((offsets != UNUSED).sum(-1) == torch.tensor([0, 1, 3])[:, None]).all()


def arguments(s: Scene) -> tuple[object, ...]:
    t, b, p, i = s.cache.table, s.batch, s.plan, s.pick.index
    return (
        s.q, s.cache.arena, t.offsets, t.rings, t.prompt, t.anchors, t.index_offsets,
        b.slots, b.positions, b.rows, p.window, p.offsets, i.mean, i.basis, i.step, i.cos, i.sin,
        i.row_pairs, p.stride, s.pick.picks, s.pick.candidates, s.pick.share, s.pick.scale,
    )  # fmt: skip


@pytest.mark.usefixtures("native")
def test_torch_sees_the_operator() -> None:
    s = scene({"resident": 0.6})
    s.cache.arena.nan_to_num_()  # the check compares copies, and NaN is unequal to itself
    results = torch.library.opcheck(torch.ops.bishop.index_select.default, arguments(s))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: (*a[:11], a[11][:, :, 1:], *a[12:]), "places for 10 picks"),
        (lambda a: (*a[:12], a[12].double(), *a[13:]), "contiguous fp32"),
        (lambda a: (*a[:15], a[15][:-20], a[16][:-20], *a[17:]), "beyond the 16 positions"),
        (lambda a: (*a[:21], 3, a[22]), "4 KV heads cannot share by 3"),
        (lambda a: (*a[:9], a[9] + 9, *a[10:]), "the offset table has 3 rows"),
        (lambda a: (*a[:7], a[7] + (1 << 20), *a[8:]), "but the arena has"),
    ],
)
def test_what_does_not_fit_is_refused(change: Callable[..., Any], message: str) -> None:
    s = scene({})
    with pytest.raises(RuntimeError, match=message):
        torch.ops.bishop.index_select(*change(arguments(s)))


def test_one_dimensional_positions_are_refused() -> None:
    angle = torch.arange(GRID.tokens)[:, None] * torch.tensor([1.0, 0.3])
    with pytest.raises(ValueError, match="needs 2-D positions"):
        row_pairs(angle.cos(), angle.sin(), GRID.stride)


@given(st.integers(0, 999))
@settings(deadline=None, max_examples=30)
def test_a_key_rebuilt_from_its_index_is_within_half_a_step(seed: int) -> None:
    """With all directions and no clipping only rounding is lost."""
    layer = random_index(GRID, HEADS, DIM, seed).layer(0, 16)
    g = torch.Generator().manual_seed(seed)
    codes = torch.rand(4, HEADS.kv_heads, 16, generator=g) * (LEVELS - 1) - (LEVELS - 1) / 2
    raw = torch.einsum("nhr,hdr->nhd", codes * layer.step, layer.basis) + layer.mean
    at = torch.randint(0, GRID.tokens, (4,), generator=g)
    turned = index_key(raw, layer.cos[at], layer.sin[at])
    rebuilt = layer.decode(layer.encode(turned, at), at)
    step = float(layer.step.max())
    assert (rebuilt - turned).norm(dim=-1).max() <= step / 2 * 16**0.5 + 1e-5


def index_key(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def test_best_prefers_the_newest_of_equals() -> None:
    scores = torch.tensor([1.0, 3.0, 3.0, 2.0, 3.0])
    keys, values = best(scores, torch.tensor([4, 5, 7, 8, 9]), 4)
    assert keys.tolist() == [9, 7, 5, 8]
    assert values.tolist() == [3.0, 3.0, 3.0, 2.0]
