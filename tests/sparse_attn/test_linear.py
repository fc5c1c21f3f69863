"""The compiled linear and row-wise operators against float64, and their bits across batches."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sparse_attn import ops, reference

pytestmark = pytest.mark.usefixtures("native", "poisoned")

SIZES = [(384, 1152), (1024, 384), (100, 257), (1, 1), (7, 63), (64, 64), (33, 130)]


def int8_weight(outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    return torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8), torch.rand(outputs) + 0.1


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 16, 65])
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_linear_is_the_reference(rows: int, inputs: int, outputs: int) -> None:
    x, w = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    close(ops.linear(x, ops.pack_weight(w)), reference.linear(x, w))
    codes, scale = int8_weight(outputs, inputs)
    close(ops.linear(x, ops.pack_weight(codes, scale)), reference.linear(x, codes, scale))


def close(actual: Tensor, expected: Tensor) -> None:
    error, size = (actual - expected).norm(), expected.norm()
    assert error <= 1e-6 * size, f"error {error} of {size}"


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(384, 1152), (1024, 100), (33, 65)])
def test_a_row_has_the_same_bits_for_1_to_64_rows(
    inputs: int, outputs: int, quantised: bool, threads: int
) -> None:
    x = torch.randn(64, inputs)
    codes, scale = int8_weight(outputs, inputs)
    weight = ops.pack_weight(codes, scale) if quantised else ops.pack_weight(codes.float() / 3)
    alone = torch.cat([ops.linear(row[None], weight) for row in x])
    for rows in range(1, 65):
        assert torch.equal(ops.linear(x[:rows], weight), alone[:rows]), f"{rows} rows"
    mates = torch.randperm(64)
    assert torch.equal(ops.linear(x[mates], weight), alone[mates])


def test_linear_does_not_depend_on_the_threads() -> None:
    x, weight = torch.randn(9, 200), ops.pack_weight(torch.randn(500, 200))
    before, results = torch.get_num_threads(), []
    for n in (1, 2, 3):
        torch.set_num_threads(n)
        results.append(ops.linear(x, weight))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_packing_loses_nothing(inputs: int, outputs: int) -> None:
    codes, scale = int8_weight(outputs, inputs)
    packed = ops.pack_weight(codes, scale)
    assert torch.equal(packed.unpack(), codes)
    assert torch.equal(packed.panels[(outputs - 1) // 64, :, (outputs - 1) % 64], codes[-1])
    half = torch.randn(outputs, inputs).half()
    assert torch.equal(ops.pack_weight(half).unpack(), half.float())


def test_no_rows_give_no_rows() -> None:
    assert ops.linear(torch.empty(0, 8), ops.pack_weight(torch.randn(3, 8))).shape == (0, 3)
    assert ops.rms_norm(torch.empty(0, 8), torch.ones(8), 1e-6).shape == (0, 8)
    assert ops.swiglu(torch.empty(0, 8)).shape == (0, 4)


@pytest.mark.parametrize("width", [1, 4, 37, 64, 384, 4100])
def test_rms_norm_is_the_reference(width: int) -> None:
    x, weight = torch.randn(5, width) * 3, torch.randn(width)
    torch.testing.assert_close(
        ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("width", [1, 4, 37, 1024])
def test_swiglu_is_the_reference(width: int) -> None:
    x = torch.randn(5, 2 * width) * 8
    x[:, :1] = torch.tensor([[-200.0], [200.0], [0.0], [-88.0], [-104.0]])
    torch.testing.assert_close(ops.swiglu(x), reference.swiglu(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dim", [4, 20, 64, 100, 128])
@pytest.mark.parametrize("norms", ["both", "none", "keys"])
def test_qk_norm_rope_is_the_reference(dim: int, norms: str) -> None:
    args = rope_arguments(5, dim, norms)
    expected = reference.qk_norm_rope(*args)
    actual = ops.qk_norm_rope(args[0].clone(), *args[1:])
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)


RopeArguments = tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor, float, int, int]


def rope_arguments(rows: int, dim: int, norms: str) -> RopeArguments:
    """4 query heads, 2 KV heads."""
    angles = torch.randn(rows, dim // 2) * 10
    q_norm = torch.randn(dim) if norms == "both" else None
    k_norm = None if norms == "none" else torch.randn(dim)
    qkv = torch.randn(rows, 8 * dim)
    return qkv, q_norm, k_norm, angles.cos(), angles.sin(), 1e-6, 4, 2


def test_the_rotation_is_done_in_place() -> None:
    args = rope_arguments(3, 20, "both")
    q, k, v = ops.qk_norm_rope(*args)
    assert torch.equal(torch.cat([q, k, v], 1).flatten(1), args[0])


def rope(x: Tensor) -> Tensor:
    qkv = x.clone()
    angles = x[:, :32]
    ops.qk_norm_rope(qkv, None, torch.ones(64), angles.cos(), angles.sin(), 1e-6, 2, 2)
    return qkv


ROW_WISE: dict[str, Callable[[Tensor], Tensor]] = {
    "rms_norm": lambda x: ops.rms_norm(x, torch.linspace(1, 2, x.shape[1]), 1e-6),
    "swiglu": ops.swiglu,
    "qk_norm_rope": rope,
}


@pytest.mark.parametrize("name", ROW_WISE)
def test_a_row_does_not_depend_on_the_others(name: str, threads: int) -> None:
    x, function = torch.randn(200, 384), ROW_WISE[name]
    alone = torch.cat([function(row[None]) for row in x])
    for rows in (*range(1, 17), 200):
        assert torch.equal(function(x[:rows].contiguous()), alone[:rows])


@pytest.mark.parametrize("name", ROW_WISE)
def test_nan_stays_in_its_row(name: str) -> None:
    x = torch.randn(4, 384)
    x[2, :64] = torch.nan
    broken = ROW_WISE[name](x).isnan().any(1)
    assert broken.tolist() == [False, False, True, False]
