"""KV in 8 bits: what it keeps, where it lies, and that both backends write the same bytes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_attn import ops, reference
from sparse_attn.format import FORMATS, VECTOR
from sparse_attn.layout import CacheLayout
from tests.sparse_attn.scenes import Shape, scene

INT8 = FORMATS["int8"]


@given(st.integers(1, 200))
def test_entries_are_padded_to_vector_loads(dim: int) -> None:
    size = INT8.entry_bytes(dim)
    assert size % VECTOR == 0
    assert 2 * dim + 8 <= size < 2 * dim + 8 + VECTOR


@given(st.integers(0, 2**16), st.sampled_from([20, 64, 100, 128]), st.floats(1e-20, 1e20))
@settings(deadline=None)
def test_a_key_reads_back_within_half_a_step(seed: int, dim: int, size: float) -> None:
    k, v = torch.randn(2, 5, dim, generator=torch.Generator().manual_seed(seed)) * size
    arena = INT8.empty(8, dim, torch.device("cpu"))
    at = torch.tensor([6, 1, 3, 0, 2])
    INT8.write(arena, at, k, v)
    for x, stored in zip((k, v), INT8.read(arena, at, dim), strict=True):
        step = x.abs().amax(-1, keepdim=True).double() / 127
        assert ((stored - x).abs() <= step * 0.5001).all()
        assert torch.equal(INT8.round_trip(x), stored.float())


def test_zeros_stay_zeros() -> None:
    arena = INT8.empty(1, 16, torch.device("cpu"))
    zeros = torch.zeros(1, 16)
    INT8.write(arena, torch.tensor([0]), zeros, zeros)
    for stored in INT8.read(arena, torch.tensor([0]), 16):
        assert torch.equal(stored, zeros.double())


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dim", [20, 64, 100, 128])
def test_append_writes_the_bytes_of_the_reference(dim: int) -> None:
    s = scene(Shape(format="int8", dim=dim, anchors=3), 1)
    k, v = torch.randn(2, len(s.q), len(s.cache.table.rings), dim)
    k[0], v[1, 0] = 0.0, k[1, 0] * 1e-30
    ops.append(k, v, s.cache, s.batch)
    native = s.cache.arena.clone()
    reference.append(k, v, s.cache, s.batch)
    assert torch.equal(native, s.cache.arena)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("seed", range(5))
def test_attention_stays_within_two_percent_of_exact_kv(seed: int) -> None:
    exact = scene(Shape(dim=64, places=20, prompt=9, group=1), seed)
    rounded = scene(Shape(dim=64, places=20, prompt=9, group=1, format="int8"), seed)
    want = reference.decode(exact.q, exact.cache, exact.plan, exact.batch, exact.scale).double()
    have = ops.decode(rounded.q, rounded.cache, rounded.plan, rounded.batch, rounded.scale)
    assert (have - want).norm() <= 2e-2 * want.norm()


@pytest.mark.usefixtures("native")
def test_an_arena_of_another_head_dim_is_refused() -> None:
    s = scene(Shape(format="int8", dim=64), 0)
    s.q = s.q[..., :20].contiguous()
    with pytest.raises(RuntimeError, match=r"int8 arena must be \[entries, 48\] for head_dim 20"):
        ops.decode(s.q, s.cache, s.plan, s.batch, s.scale)


def test_bytes_against_bf16() -> None:
    rings = ((552,) * 6,) * 12
    sizes = {n: CacheLayout(33, 24, rings, 64, FORMATS[n]).visual_bytes for n in ("bf16", "int8")}
    assert sizes["bf16"] / sizes["int8"] == 256 / 144
