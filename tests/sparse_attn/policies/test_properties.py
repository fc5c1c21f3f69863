"""What every policy must keep, on random grids, budgets, positions and learnt states."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sparse_attn import attention, policies, reference
from sparse_attn.budget import read_budget
from sparse_attn.cache import LayerCache, LayerTable
from sparse_attn.geometry import Grid
from sparse_attn.layout import FORMATS, CacheLayout
from sparse_attn.masks import read_masks
from sparse_attn.policy import Heads, ReadPolicy
from sparse_attn.teacher import read_sets
from tests.sparse_attn.policies.strategies import any_policy, batch_of, learnt_state

settings.register_profile("short", max_examples=60, deadline=None)
settings.load_profile("short")

CPU = torch.device("cpu")
DIM = 4


@given(any_policy(), st.integers(0, 9), st.data())
def test_every_read_key_is_resident(policy: ReadPolicy, seed: int, data: st.DataObject) -> None:
    t = data.draw(st.integers(0, policy.grid.tokens - 1))
    for layer in range(policy.heads.layers):
        state = learnt_state(policy, t, seed, layer=layer)
        mask = policy.reads(layer, state, batch_of([t]))[0]
        for head in range(policy.heads.kv_heads):
            stored = policy.resident(layer, head, t, state, 0)
            assert set(mask[head].nonzero()[:, 0].tolist()) <= set(stored)
            assert t in stored


@given(any_policy(), st.data())
def test_the_dead_stay_dead(policy: ReadPolicy, data: st.DataObject) -> None:
    """A key is stored from the step that writes it until it dies, and never again."""
    layer = data.draw(st.integers(0, policy.heads.layers - 1))
    head = data.draw(st.integers(0, policy.heads.kv_heads - 1))
    state, seen, dead = policy.new_state(1, CPU), set(), set()
    for t in range(policy.grid.tokens):
        stored = set(policy.resident(layer, head, t, state, 0))
        assert not stored & dead, "came back"
        dead |= seen - stored
        seen |= stored
        if policy.learns:
            batch = batch_of([t])
            weights = torch.rand(1, policy.heads.kv_heads, policy.grid.tokens)
            policy.update(layer, state, batch, weights * policy.reads(layer, state, batch))
    assert seen == set(range(policy.grid.tokens))


@given(any_policy(), st.integers(0, 9), st.data())
def test_reads_keep_to_the_sparsity(policy: ReadPolicy, seed: int, data: st.DataObject) -> None:
    t = data.draw(st.integers(0, policy.grid.tokens - 1))
    states = [learnt_state(policy, t, seed, layer=i) for i in range(policy.heads.layers)]
    masks = [policy.reads(i, state, batch_of([t]))[0] for i, state in enumerate(states)]
    count = torch.stack(masks).sum(-1)
    assert count.max() <= policy.read_bound()
    assert count.sum() == policy.read_total(t)
    if policy.name != "dense":
        assert count.sum() <= policy.budget * count.numel()


@given(any_policy(), st.integers(0, 9), st.data())
def test_the_vectorised_mask_is_the_reference(
    policy: ReadPolicy, seed: int, data: st.DataObject
) -> None:
    t = data.draw(st.integers(0, policy.grid.tokens - 1))
    batch = batch_of([t])
    for layer in range(policy.heads.layers):
        state = learnt_state(policy, t, seed, layer=layer)
        plan = policy.plan(layer, state, CPU)
        mask = read_masks(plan, batch.rows, batch.positions.long(), policy.grid.tokens)
        assert torch.equal(mask, policy.reads(layer, state, batch))


@given(any_policy(), st.sampled_from(sorted(FORMATS)), st.integers(0, 3))
def test_resident_bytes_are_what_the_scheduler_is_told(
    policy: ReadPolicy, name: str, prompt: int
) -> None:
    layout = CacheLayout.of(policy, prompt, DIM, FORMATS[name])
    pairs = policy.heads.layers * policy.heads.kv_heads
    most = [0] * pairs
    for t, state in _states(policy):
        for p in range(pairs):
            layer, head = divmod(p, policy.heads.kv_heads)
            most[p] = max(most[p], len(policy.resident(layer, head, t, state, 0)))
    stored = sum(most)
    entry = FORMATS[name].entry_bytes(DIM)
    index = layout.index_bytes * stored
    assert layout.visual_bytes == stored * entry + index
    raw = (stored + pairs * prompt) * entry + index
    assert raw <= layout.bytes < raw + 256 + 16 * pairs * bool(index)


def _states(policy: ReadPolicy) -> Iterator[tuple[int, torch.Tensor | None]]:
    """Positions of the last row, with a learnt state for each."""
    last = policy.grid.tokens - 1
    state = learnt_state(policy, last - policy.grid.stride, 0)
    for t in range(last - policy.grid.stride, last + 1):
        yield t, state
        state = learnt_state(policy, t + 1, 0, state, t)


@given(any_policy(sparsity=0.0), st.integers(0, 9))
def test_at_density_one_the_output_is_that_of_dense(policy: ReadPolicy, seed: int) -> None:
    dense = policies.build("dense", policy.grid, policy.heads)
    assert torch.allclose(drawn(policy, seed), drawn(dense, seed), atol=1e-6)


@given(any_policy(), st.integers(0, 9))
def test_eviction_and_indirection_give_what_a_mask_gives(policy: ReadPolicy, seed: int) -> None:
    """Attention on the cache, step by step, is masked attention over everything ever written."""
    masks: list[torch.Tensor] = []
    out, (q, k, v) = drawn(policy, seed, masks), inputs(policy, seed)
    for t in range(policy.grid.tokens):
        score = torch.einsum("hd,jhd->hj", q[t].double(), k.double()) * DIM**-0.5
        allowed = torch.cat(
            [torch.ones(policy.heads.kv_heads, PROMPT, dtype=torch.bool), masks[t]], 1
        )
        p = score.masked_fill(~allowed, -torch.inf).softmax(-1)
        expected = torch.einsum("hj,jhd->hd", p, v.double()).float()
        assert torch.allclose(out[t], expected, atol=1e-5)


PROMPT = 2


def inputs(policy: ReadPolicy, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [N, H, D]; keys and values [prompt + N, H, D] of layer 0."""
    generator = torch.Generator().manual_seed(seed)
    n, h = policy.grid.tokens, policy.heads.kv_heads
    q = torch.randn(n, h, DIM, generator=generator)
    k, v = torch.randn(2, PROMPT + n, h, DIM, generator=generator)
    return q, k, v


def drawn(
    policy: ReadPolicy,
    seed: int,
    masks: list[torch.Tensor] | None = None,
    backend: attention.Backend = "reference",
) -> torch.Tensor:
    """Layer 0 of a whole image, in a poisoned cache: [N, H, D]."""
    layout = CacheLayout.of(policy, PROMPT, DIM, FORMATS["fp32"])
    entries = -(-layout.bytes // layout.format.entry_bytes(DIM))
    arena = layout.format.empty(entries, DIM, CPU)
    arena.view(torch.uint8).fill_(255)
    cache = LayerCache(arena, LayerTable.of(layout, 0, CPU))
    q, k, v = inputs(policy, seed)
    reference.append_prompt(k[:PROMPT], v[:PROMPT], cache, 0)
    state, out = policy.new_state(1, CPU), []
    for t in range(policy.grid.tokens):
        batch = batch_of([t], [PROMPT])
        plan = policy.plan(0, state, CPU)
        if masks is not None and not policy.index_bytes:
            masks.append(policy.reads(0, state, batch)[0])
        new = slice(PROMPT + t, PROMPT + t + 1)
        attention.append(k[new], v[new], cache, batch, backend, plan=plan)
        args = (q[t][None], cache, policy, plan, batch, DIM**-0.5)
        out.append(attention.decode(*args, layer=0, state=state, backend=backend))
        if masks is not None and policy.index_bytes:
            masks.append(policy.reads(0, state, batch)[0])
    return torch.cat(out)


@pytest.mark.parametrize(
    ("name", "sparsity", "options", "message"),
    [
        ("window", 0.9, {"anchors": "first_row"}, "use up"),
        ("window", 0.9, {"anchors": 99}, "anchors must lie in"),
        ("window", 0.9, {"anchors": "last_row"}, "first_row"),
        ("window", 1.0, {}, "sparsity must lie in"),
        ("streaming", 0.9, {"sink": 0}, "at least 1 sink"),
        ("streaming", 0.9, {"sink": 9}, "use up"),
        ("lines", 0.5, {"rows": 0}, "rows = 0"),
        ("lines", 0.5, {"rows": 8}, "must be at least 1 and fit"),
        ("lines", 0.85, {}, "must be at least 1 and fit"),
        ("stencil", 0.9, {"rows": 0}, "row bound R of at least 1"),
        ("diagonal", 0.9, {"recent": 2}, "at least"),
        ("dense", 0.5, {}, "no sparsity"),
        ("windw", 0.5, {}, "did you mean 'window'"),
        ("window", 0.5, {"row": 3}, "has no option 'row'"),
        ("indexed", 0.5, {}, "needs the option 'file'"),
    ],
)
def test_what_cannot_be_says_so(
    name: str, sparsity: float, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        policies.build(name, Grid(8, 8), Heads(1, 1), sparsity, options)


def test_the_budget_is_the_papers() -> None:
    assert read_budget(Grid(24, 24), 0.95) == 29
    assert read_budget(Grid(48, 48, 1), 0.9) == 236


@given(any_policy(), st.integers(0, 9))
def test_teacher_forcing_reads_what_decoding_reads(policy: ReadPolicy, seed: int) -> None:
    masks: list[torch.Tensor] = []
    drawn(policy, seed, masks)
    q, k, _ = inputs(policy, seed)
    sets = read_sets(policy, 0, q[None], k[None, PROMPT:], k[None, :PROMPT], DIM**-0.5)
    assert torch.equal(sets[0], torch.stack(masks, 1))


@pytest.mark.usefixtures("native")
@given(any_policy(), st.integers(0, 9))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_compiled_operators_draw_what_the_reference_draws(
    policy: ReadPolicy, seed: int
) -> None:
    """Picks by an index are compared in test_index: rounding may decide between two keys here."""
    assume(attention.why_not(policy, "native") is None and not policy.index_bytes)
    native = drawn(policy, seed, backend="native")
    assert torch.allclose(native, drawn(policy, seed), atol=1e-5)
