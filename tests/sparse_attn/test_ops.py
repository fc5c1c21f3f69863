"""The operators as torch sees them, and what they refuse."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparse_attn import ops
from sparse_attn.policy import Batch, ReadPlan
from tests.sparse_attn.scenes import Scene, Shape, scene

pytestmark = pytest.mark.usefixtures("native")

B = torch.ops.bishop


def test_says_what_was_built() -> None:
    assert ops.available()
    assert ops.why_not() is None
    assert ops.built()["cpu"] in ("avx512", "avx2", "portable")
    assert ops.built()["cuda"]


def test_says_how_to_build_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_failure", "no such file")
    assert not ops.available()
    s = scene(Shape(), 0)
    with pytest.raises(RuntimeError, match="no such file.*make build.*reference"):
        ops.decode(s.q, s.cache, s.plan, s.batch, s.scale)


def decode_arguments(s: Scene) -> tuple[Any, ...]:
    t, b, p = s.cache.table, s.batch, s.plan
    return (
        s.q, s.cache.arena, t.offsets, t.rings, t.prompt, t.anchors, b.slots, b.positions,
        b.prompts, b.rows, p.window, p.offsets, p.anchors, p.stride, s.scale,
    )  # fmt: skip


def samples() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    s = scene(Shape(strided=True), 0)
    decode = decode_arguments(s)
    k, v = torch.randn(2, 4, 3, 20)
    x, packed = torch.randn(3, 8), ops.pack_weight(torch.randn(5, 8))
    angle = torch.rand(3, 2)
    return {
        "append": (B.append, (k, v, *decode[1:8])),
        "decode": (B.decode, decode),
        "decode without offsets": (B.decode, (*decode[:11], None, *decode[12:])),
        "decode_select": (B.decode_select, (*decode, 0, 100)),
        "linear": (B.linear, (x, packed.panels, None, 5)),
        "rms_norm": (B.rms_norm, (x, torch.ones(8), 1e-6)),
        "swiglu": (B.swiglu, (x,)),
        "qk_norm_rope": (
            B.qk_norm_rope,
            (torch.rand(3, 16), None, torch.ones(4), angle, angle, 1e-6, 2, 1),
        ),
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", list(samples()) if ops.available() else [])
def test_opcheck(name: str) -> None:
    operator, arguments = samples()[name]
    torch.library.opcheck(operator.default, arguments)


def at(b: Batch, **values: list[int]) -> Batch:
    """The batch with other values, of the same dtypes."""
    return replace(
        b, **{name: torch.tensor(x, dtype=getattr(b, name).dtype) for name, x in values.items()}
    )


def with_plan(s: Scene, **changes: Any) -> Scene:
    return replace(s, plan=replace(s.plan, **changes))


def with_table(s: Scene, **changes: Any) -> Scene:
    return replace(s, cache=replace(s.cache, table=replace(s.cache.table, **changes)))


def shared_select(s: Scene) -> Scene:
    assert s.plan.offsets is not None
    return with_plan(s, offsets=s.plan.offsets[:1], select=(0, 9))


REFUSED: dict[str, tuple[str, Callable[[Scene], Scene]]] = {
    "float64 queries": ("q must be fp32", lambda s: replace(s, q=s.q.double())),
    "queries of another head dim": (
        r"q must be \[4, 6, 20\]",
        lambda s: replace(s, q=s.q[..., :8]),
    ),
    "queries of other heads": ("no multiple of the 3 KV", lambda s: replace(s, q=s.q[:, :4])),
    "fewer queries": (r"q must be \[4, 6, 20\]", lambda s: replace(s, q=s.q[:2])),
    "transposed queries": (
        "side by side.*contiguous",
        lambda s: replace(s, q=s.q.transpose(1, 2).contiguous().transpose(1, 2)),
    ),
    "slot past the arena": (
        r"slots\[1\] = 99999.*arena has",
        lambda s: replace(s, batch=at(s.batch, slots=[0, 99999, 0, 0])),
    ),
    "negative slot": (r"slots\[0\]", lambda s: replace(s, batch=at(s.batch, slots=[-1, 0, 0, 0]))),
    "negative position": (
        r"positions\[3\] = -1",
        lambda s: replace(s, batch=at(s.batch, positions=[0, 0, 0, -1])),
    ),
    "prompt past its room": (
        r"prompts\[2\] is 6.*room for 5",
        lambda s: replace(s, batch=at(s.batch, prompts=[0, 0, 6, 0])),
    ),
    "row past the table": (
        r"rows\[0\] is 4.*4 rows",
        lambda s: replace(s, batch=at(s.batch, rows=[4, 0, 0, 0])),
    ),
    "positions of another dtype": (
        "positions must be Int",
        lambda s: replace(s, batch=replace(s.batch, positions=s.batch.positions.long())),
    ),
    "window of other heads": (
        r"window must be Int \[3\]",
        lambda s: with_plan(s, window=s.plan.window[:2].clone()),
    ),
    "offsets of other heads": (
        r"offsets must be int16 \[R, 3, n, 2\]",
        lambda s: with_plan(s, offsets=torch.zeros(4, 2, 6, 2, dtype=torch.int16)),
    ),
    "offsets apart": (
        "offsets of a head must lie side by side",
        lambda s: with_plan(s, offsets=torch.zeros(4, 3, 2, 6, dtype=torch.int16).mT),
    ),
    "no stride": ("stride must be at least 1", lambda s: with_plan(s, stride=0)),
    "a table to learn shared by all": ("one row of offsets per sequence", shared_select),
    "ringless cache": (
        "no place in a cache without a ring",
        lambda s: with_table(s, rings=torch.zeros(3, dtype=torch.int32)),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_decode_refuses(name: str) -> None:
    message, change = REFUSED[name]
    s = change(scene(Shape(), 0))
    with pytest.raises(RuntimeError, match=message):
        ops.decode(s.q, s.cache, s.plan, s.batch, s.scale)


def test_head_dims_that_are_no_multiple_of_4_are_refused() -> None:
    s = scene(Shape(dim=6), 0)
    with pytest.raises(RuntimeError, match="multiple of 4.*reference"):
        ops.decode(s.q, s.cache, s.plan, s.batch, s.scale)


def test_append_refuses_a_place_outside_the_arena() -> None:
    s = scene(Shape(), 0)
    k = torch.zeros(4, 3, 20)
    with pytest.raises(RuntimeError, match=r"k must be \[4, 3, 20\]"):
        ops.append(k[:, :2], k, s.cache, s.batch)
    with pytest.raises(RuntimeError, match=r"slots\[0\]"):
        ops.append(k, k, s.cache, at(s.batch, slots=[99999, 0, 0, 0]))


def test_a_plan_that_reads_evicted_keys_stays_inside_the_cache() -> None:
    """Wrong answers may come of a wrong plan, reads outside the region may not."""
    s = scene(Shape(), 0)
    s = replace(s, batch=at(s.batch, positions=[20, 39, 30, 39]))
    assert s.plan.offsets is not None
    far = torch.full_like(s.plan.offsets, 0)
    far[..., 0] = torch.arange(6).short() * 6 + 1
    s = with_plan(s, offsets=far, window=torch.full((3,), 40, dtype=torch.int32))
    s.cache.arena.fill_(1.0)
    assert torch.allclose(ops.decode(s.q, s.cache, s.plan, s.batch, s.scale), torch.tensor(1.0))


def packed(panels: Tensor, scale: Tensor | None, outputs: int) -> ops.PackedWeight:
    return ops.PackedWeight(panels, scale, outputs)


@pytest.mark.parametrize(
    ("message", "x", "weight"),
    [
        ("x must be fp32", torch.zeros(2, 8).double(), packed(torch.zeros(1, 8, 64), None, 5)),
        ("x must be contiguous", torch.zeros(8, 2).T, packed(torch.zeros(1, 8, 64), None, 5)),
        ("8 inputs, the weight 9", torch.zeros(2, 8), packed(torch.zeros(1, 9, 64), None, 5)),
        ("out_features = 65", torch.zeros(2, 8), packed(torch.zeros(1, 8, 64), None, 65)),
        ("takes none", torch.zeros(2, 8), packed(torch.zeros(1, 8, 64), torch.ones(5), 5)),
        ("as pack_weight makes it", torch.zeros(2, 8), packed(torch.zeros(5, 8), None, 5)),
        (
            r"scale must be fp32 \[5\]",
            torch.zeros(2, 8),
            packed(torch.zeros(1, 8, 64, dtype=torch.int8), torch.ones(6), 5),
        ),
    ],
)
def test_linear_refuses(message: str, x: Tensor, weight: ops.PackedWeight) -> None:
    with pytest.raises(RuntimeError, match=message):
        ops.linear(x, weight)


@pytest.mark.parametrize(
    ("message", "weight", "scale"),
    [
        ("floating point or int8", torch.zeros(2, 2, dtype=torch.int32), None),
        ("floating point or int8", torch.zeros(2), None),
        ("have a scale", torch.zeros(2, 2, dtype=torch.int8), None),
        ("have a scale", torch.zeros(2, 2), torch.ones(2)),
        (r"must be \[2\]", torch.zeros(2, 2, dtype=torch.int8), torch.ones(3)),
    ],
)
def test_pack_weight_refuses(message: str, weight: Tensor, scale: Tensor | None) -> None:
    with pytest.raises(ValueError, match=message):
        ops.pack_weight(weight, scale)


def test_row_wise_operators_refuse() -> None:
    x, angle = torch.zeros(2, 16), torch.zeros(2, 2)
    with pytest.raises(RuntimeError, match=r"weight must be fp32 \[16\]"):
        ops.rms_norm(x, torch.ones(8), 1e-6)
    with pytest.raises(RuntimeError, match=r"\[M, 2 F\]"):
        ops.swiglu(torch.zeros(2, 7))
    with pytest.raises(RuntimeError, match=r"must be \[M, 20\]"):
        ops.qk_norm_rope(x, None, None, angle, angle, 1e-6, 3, 1)
    with pytest.raises(RuntimeError, match="cos and sin"):
        ops.qk_norm_rope(x, None, None, angle, angle[:1], 1e-6, 2, 1)


def test_a_plan_without_offsets_learns_nothing() -> None:
    plan = ReadPlan(torch.ones(3, dtype=torch.int32), None, 0, 8, select=(0, 9))
    s = replace(scene(Shape(), 0), plan=plan)
    with pytest.raises(RuntimeError, match="has no offsets to learn"):
        ops.decode(s.q, s.cache, s.plan, s.batch, s.scale)
