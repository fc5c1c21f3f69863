"""Linears and norms on a chosen backend.

An image must not depend on its batch mates. The native operators compute every row by itself; the
reference runs torch on tiles of a fixed number of rows, so that the shape never changes.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_attn import ops
from sparse_attn.attention import Backend

ROW_TILE = 16


def tiled(
    function: Callable[[Float[Tensor, "T K"]], Float[Tensor, "T N"]], x: Float[Tensor, "M K"]
) -> Float[Tensor, "M N"]:
    """Apply a row-wise function to tiles of exactly `ROW_TILE` rows, padding the last one."""
    rows = len(x)
    x = torch.nn.functional.pad(x, (0, 0, 0, -rows % ROW_TILE))
    return torch.cat([function(tile) for tile in x.split(ROW_TILE)])[:rows]


class Linear:
    """y = x W^T without bias; W float, or int8 with one scale per output row.

    weight: [N, K]. scale: [N] or None.
    """

    def __init__(self, weight: Tensor, scale: Tensor | None, backend: Backend) -> None:
        self.backend = backend
        self.outputs, self.inputs = weight.shape
        if backend == "native":
            self._packed = ops.pack_weight(weight, scale)
        else:
            self._dense = weight.float() if scale is None else weight.float() * scale[:, None]

    @property
    def nbytes(self) -> int:
        """Bytes that one product reads of the weight."""
        if self.backend == "native":
            scale = self._packed.scale
            return self._packed.panels.nbytes + (0 if scale is None else scale.nbytes)
        return self._dense.nbytes

    def __call__(self, x: Float[Tensor, "M K"]) -> Float[Tensor, "M N"]:
        if self.backend == "native":
            return ops.linear(x, self._packed)
        return tiled(lambda tile: tile @ self._dense.T, x)


def rms_norm(x: Float[Tensor, "M K"], weight: Tensor, eps: float, backend: Backend) -> Tensor:
    if backend == "native":
        return ops.rms_norm(x, weight, eps)
    return tiled(lambda t: t * torch.rsqrt(t.square().mean(-1, keepdim=True) + eps) * weight, x)


def swiglu(gate_up: Float[Tensor, "M F2"], backend: Backend) -> Float[Tensor, "M F"]:
    """silu(gate) * up of rows that hold gate first, then up."""
    if backend == "native":
        return ops.swiglu(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def rotated_heads(
    qkv: Float[Tensor, "M E"],
    norms: tuple[Tensor, Tensor] | None,
    cos: Float[Tensor, "M h"],
    sin: Float[Tensor, "M h"],
    heads: tuple[int, int],
    eps: float,
    backend: Backend,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v heads of rows [q | k | v]: RMS norm of q and k (where weights are given), rotation.

    heads: (query heads, KV heads). qkv may be overwritten.
    """
    if backend == "native":
        q_norm, k_norm = norms or (None, None)
        return ops.qk_norm_rope(qkv, q_norm, k_norm, cos, sin, eps, *heads)
    rows = qkv.view(len(qkv), heads[0] + 2 * heads[1], -1)
    q, k, v = rows.split((heads[0], heads[1], heads[1]), 1)
    if norms is not None:
        q, k = (_norm_heads(x, w, eps) for x, w in zip((q, k), norms, strict=True))
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def _norm_heads(x: Float[Tensor, "M H D"], weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x.reshape(-1, x.shape[-1]), weight, eps, "reference").view(x.shape)


def rotate(x: Float[Tensor, "M H D"], cos: Tensor, sin: Tensor) -> Float[Tensor, "M H D"]:
    """Rotary embedding, half-split: pairs (i, i + D/2)."""
    a, b = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
