"""`torch.ops.bishop.*`: the compiled operators, their fakes, and why they cannot run if so."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from sparse_attn.cache import LayerCache
from sparse_attn.index import Pick
from sparse_attn.policy import Batch, ReadPlan

try:
    from sparse_attn import _C
except ImportError as error:
    _failure: str | None = str(error)
else:
    _failure = None


def available() -> bool:
    """Whether the compiled operators are there."""
    return _failure is None


def why_not() -> str | None:
    """Why the compiled operators cannot run and what to do; None if they can."""
    if _failure is None:
        return None
    return (
        f"the extension sparse_attn._C is not built or does not load ({_failure}): run "
        '`make build`, or choose backend="reference"'
    )


def built() -> dict[str, str]:
    """What was built: `cpu` is the instruction set, `cuda` says "built" or why not."""
    _require()
    return {"cpu": _C.cpu, "cuda": _C.cuda}


def append(
    k: Float[Tensor, "B H D"], v: Float[Tensor, "B H D"], cache: LayerCache, batch: Batch
) -> None:
    """Store the key and value (fp32) of each sequence's position in its ring or anchors.

    Raises RuntimeError if the operators are not built, or naming the argument that does not fit.
    """
    _require()
    torch.ops.bishop.append(k, v, *_cache(cache), batch.slots, batch.positions)


def decode(
    q: Float[Tensor, "B Hq D"], cache: LayerCache, plan: ReadPlan, batch: Batch, scale: float
) -> Float[Tensor, "B Hq D"]:
    """Attention of one fp32 query per sequence over its prompt and the plan's reads.

    Where the plan asks for it, `plan.offsets` is updated in place. The result of a sequence does
    not depend on the others, nor on the number of threads. Raises as `append` does.
    """
    _require()
    where = (batch.slots, batch.positions, batch.prompts, batch.rows)
    reads = (plan.window, plan.offsets, plan.anchors, plan.stride, scale)
    out: Tensor
    if plan.select is None:
        out = torch.ops.bishop.decode(q, *_cache(cache), *where, *reads)
    else:
        if plan.offsets is None:
            raise RuntimeError("this plan selects, but has no offsets to learn")
        out = torch.ops.bishop.decode_select(q, *_cache(cache), *where, *reads, *plan.select)
    return out


def index_select(
    q: Float[Tensor, "B Hq D"], cache: LayerCache, plan: ReadPlan, batch: Batch, pick: Pick
) -> None:
    """Index each sequence's own key, as it is stored, then write the offsets of the keys its query
    picks into `plan.offsets`, best first.

    Raises as `append` does; needs positions that separate into rows and columns (2-D rotary).
    """
    _require()
    if plan.offsets is None:
        raise RuntimeError("index_select needs a table for the picks")
    table, index = cache.table, pick.index
    torch.ops.bishop.index_select(
        q, cache.arena, table.offsets, table.rings, table.prompt, table.anchors,
        table.index_offsets, batch.slots, batch.positions, batch.rows, plan.window, plan.offsets,
        index.mean, index.basis, index.step, index.cos, index.sin, index.row_pairs, plan.stride,
        pick.picks, pick.candidates, pick.share, pick.scale,
    )  # fmt: skip


PANEL = 64
"""Outputs of a packed weight that lie side by side."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight [N, K] in the panels that `linear` reads: row n is panels[n // 64, :, n % 64].

    panels: fp32 or int8 [ceil(N / 64), K, 64], zero-padded. scale: fp32 [N] for int8, else None.
    """

    panels: Shaped[Tensor, "N//64 K 64"]
    scale: Float[Tensor, "N"] | None
    outputs: int

    def unpack(self) -> Shaped[Tensor, "N K"]:
        """The weight as it was packed."""
        return self.panels.transpose(1, 2).reshape(-1, self.panels.shape[1])[: self.outputs]


def pack_weight(weight: Shaped[Tensor, "N K"], scale: Tensor | None = None) -> PackedWeight:
    """Pack a linear layer's weight: floating point (kept as fp32), or int8 with a scale per row.

    Raises ValueError for another dtype, and where a scale is missing or has no use.
    """
    if weight.ndim != 2 or not (weight.is_floating_point() or weight.dtype == torch.int8):
        raise ValueError(f"a weight must be floating point or int8 [N, K], got {_text(weight)}")
    if (scale is None) != weight.is_floating_point():
        raise ValueError(f"int8 weights, and no others, have a scale; got {_text(weight)}")
    outputs, inputs = weight.shape
    if scale is not None and scale.shape != (outputs,):
        raise ValueError(f"the scale of {_text(weight)} must be [{outputs}], got {_text(scale)}")
    stored = weight.float() if weight.is_floating_point() else weight
    padded = torch.nn.functional.pad(stored, (0, 0, 0, -outputs % PANEL))
    panels = padded.view(-1, PANEL, inputs).transpose(1, 2).contiguous()
    return PackedWeight(panels, None if scale is None else scale.float().contiguous(), outputs)


def linear(x: Float[Tensor, "M K"], weight: PackedWeight) -> Float[Tensor, "M N"]:
    """x W^T in fp32.

    Every output is one chain of FMAs over K, so that a row's result is the same bits whatever
    the number of rows and threads. Raises as `append` does.
    """
    _require()
    out: Tensor = torch.ops.bishop.linear(x, weight.panels, weight.scale, weight.outputs)
    return out


def rms_norm(
    x: Float[Tensor, "M K"], weight: Float[Tensor, "K"], eps: float
) -> Float[Tensor, "M K"]:
    """x / sqrt(mean(x^2) + eps) * weight, row by row, in fp32."""
    _require()
    out: Tensor = torch.ops.bishop.rms_norm(x, weight, eps)
    return out


def swiglu(gate_up: Float[Tensor, "M 2*F"]) -> Float[Tensor, "M F"]:
    """silu(gate) * up for rows [gate | up], in fp32."""
    _require()
    out: Tensor = torch.ops.bishop.swiglu(gate_up)
    return out


def qk_norm_rope(
    qkv: Float[Tensor, "M (Hq+2*H)*D"],
    q_norm: Float[Tensor, "D"] | None,
    k_norm: Float[Tensor, "D"] | None,
    cos: Float[Tensor, "M D//2"],
    sin: Float[Tensor, "M D//2"],
    eps: float,
    heads: int,
    kv_heads: int,
) -> tuple[Float[Tensor, "M Hq D"], Float[Tensor, "M H D"], Float[Tensor, "M H D"]]:
    """RMS norm of every q and k head (where a weight is given), then the half-split rotation
    (x1 cos - x2 sin, x1 sin + x2 cos), in place. Returns q, k and v as views of `qkv`."""
    _require()
    torch.ops.bishop.qk_norm_rope(qkv, q_norm, k_norm, cos, sin, eps, heads, kv_heads)
    q, k, v = qkv.view(len(qkv), heads + 2 * kv_heads, -1).split((heads, kv_heads, kv_heads), 1)
    return q, k, v


def sample(
    logits: Float[Tensor, "R V"],
    partners: Int64[Tensor, "B"],
    settings: Float[Tensor, "B 3"],
    top_k: Int64[Tensor, "B"],
    keys: Int64[Tensor, "B"],
) -> Int64[Tensor, "B"]:
    """One token per image from rows of logits; -1 where they are not finite.

    Row b is image b's conditional row; partners: its unconditional row, or -1. settings: guidance
    scale, temperature (0: arg-max), top_p. keys: hash of seed and position. See engine/sampling.py.
    """
    _require()
    out: Tensor = torch.ops.bishop.sample(logits, partners, settings, top_k, keys)
    return out


def _cache(cache: LayerCache) -> tuple[Tensor, Tensor, Tensor, int, int]:
    table = cache.table
    return cache.arena, table.offsets, table.rings, table.prompt, table.anchors


def _text(t: Tensor) -> str:
    return f"{t.dtype} {list(t.shape)}"


def _require() -> None:
    reason = why_not()
    if reason is not None:
        raise RuntimeError(reason)


def _no_result(*_args: object) -> None:
    return None


def _like_first(x: Tensor, *_args: object) -> Tensor:
    return x.new_empty(x.shape)


def _linear_result(x: Tensor, _packed: Tensor, _scale: Tensor | None, outputs: int) -> Tensor:
    return x.new_empty((x.shape[0], outputs))


def _half_as_wide(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))


def _like_second(_x: Tensor, y: Tensor, *_args: object) -> Tensor:
    return y.new_empty(y.shape)


_FAKES: dict[str, Callable[..., Any]] = {
    "append": _no_result,
    "decode": _like_first,
    "decode_select": _like_first,
    "index_select": _no_result,
    "linear": _linear_result,
    "rms_norm": _like_first,
    "swiglu": _half_as_wide,
    "qk_norm_rope": _no_result,
    "sample": _like_second,
}

if available():
    for _name, _fake in _FAKES.items():
        torch.library.register_fake(f"bishop::{_name}", _fake)
