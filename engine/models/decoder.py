"""The decoder that the published families share: Llama's layers with the options they differ in.

Weights are fused when they are loaded: q, k, v into one matrix, gate and up into another.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from engine.checkpoint import Convert, LayerTensors, Param, Source
from engine.layers import Linear, rms_norm, rotate, rotated_heads, swiglu, tiled
from engine.models.base import SubBatchRun
from engine.parallel.shard import WHOLE, Shard, Split
from sparse_attn.attention import Backend

Activation = Literal["silu", "gelu_tanh"]
QKNorm = Literal["none", "layer"]
NormOrder = Literal["pre", "post", "sandwich"]


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and options of a decoder.

    qk_norm: "layer" is a layer norm over each head with weights of its own (Chameleon).
    norms: "pre" normalises what enters attention and MLP, "post" what leaves them (Swin's order),
        "sandwich" both.
    unit_offset: the checkpoint stores norm weights minus one (Gemma).
    """

    dim: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    norm_eps: float
    activation: Activation = "silu"
    qk_norm: QKNorm = "none"
    norms: NormOrder = "pre"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    unit_offset: bool = False

    def __post_init__(self) -> None:
        if self.q_heads % self.kv_heads:
            raise ValueError(f"{self.q_heads} heads cannot share {self.kv_heads} KV heads evenly")

    @property
    def split(self) -> Split:
        """What tensor parallelism divides."""
        return Split(self.q_heads, self.kv_heads, self.head_dim, self.ffn)

    def part(self, shard: Shard) -> "DecoderConfig":
        """The sizes of a shard. Raises ValueError if they cannot be divided so."""
        self.split.check(shard.size)
        n = shard.size
        return replace(
            self, q_heads=self.q_heads // n, kv_heads=self.kv_heads // n, ffn=self.ffn // n
        )

    @property
    def qkv_rows(self) -> tuple[int, int, int]:
        return (
            self.q_heads * self.head_dim,
            self.kv_heads * self.head_dim,
            self.kv_heads * self.head_dim,
        )


@dataclass(frozen=True)
class LayerNames:
    """What a checkpoint calls the parts of layer {i}; a tuple is stacked when it is loaded."""

    attn_norm: str
    mlp_norm: str
    qkv: tuple[str, ...]
    out: str
    gate_up: tuple[str, ...]
    down: str
    q_norm: str = ""
    k_norm: str = ""
    attn_after: str = ""
    mlp_after: str = ""

    @classmethod
    def hugging_face(cls, prefix: str, fused_gate_up: bool = False) -> "LayerNames":
        """As transformers names the layers below `prefix`."""
        layer = f"{prefix}layers.{{i}}."
        attn, mlp = layer + "self_attn.", layer + "mlp."
        split = (mlp + "gate_proj", mlp + "up_proj")
        return cls(
            attn_norm=layer + "input_layernorm",
            mlp_norm=layer + "post_attention_layernorm",
            qkv=(attn + "q_proj", attn + "k_proj", attn + "v_proj"),
            out=attn + "o_proj",
            gate_up=(mlp + "gate_up_proj",) if fused_gate_up else split,
            down=mlp + "down_proj",
            q_norm=attn + "q_norm",
            k_norm=attn + "k_norm",
            attn_after=layer + "post_self_attn_layernorm",
            mlp_after=layer + "post_mlp_layernorm",
        )


def layer_params(
    c: DecoderConfig, names: LayerNames, convert_qkv: tuple[Convert | None, ...] = ()
) -> list[Param]:
    """What all layers keep, and where a checkpoint has it; `convert_qkv` goes with `names.qkv`."""
    return [p for i in range(c.layers) for p in _layer_params(c, names, i, convert_qkv)]


def _layer_params(
    c: DecoderConfig, names: LayerNames, i: int, convert_qkv: tuple[Convert | None, ...]
) -> list[Param]:
    def linear(
        ours: str, theirs: tuple[str, ...], rows: tuple[int, ...], inputs: int, bias: bool,
        converts: tuple[Convert | None, ...] = (),
    ) -> list[Param]:  # fmt: skip
        if len(theirs) == 1:
            rows = (sum(rows),)
        converts = converts or (None,) * len(theirs)
        parts = [(t.format(i=i), n, f) for t, n, f in zip(theirs, rows, converts, strict=True)]
        weight = tuple(Source(f"{t}.weight", (n, inputs), f) for t, n, f in parts)
        found = [Param(f"layers.{i}.{ours}.weight", weight)]
        if bias:
            vector = tuple(Source(f"{t}.bias", (n,), f) for t, n, f in parts)
            found.append(Param(f"layers.{i}.{ours}.bias", vector, dtype=torch.float32))
        return found

    def norm(ours: str, theirs: str) -> Param:
        return norm_param(f"layers.{i}.{ours}", theirs.format(i=i), c)

    def head_norm(ours: str, theirs: str, heads: int) -> list[Param]:
        at, shape = theirs.format(i=i), (heads, c.head_dim)
        return [
            Param(f"layers.{i}.{ours}.weight", (Source(f"{at}.weight", shape),),
                  dtype=torch.float32, spread=0.1, mean=1.0),
            Param(f"layers.{i}.{ours}.bias", (Source(f"{at}.bias", shape),),
                  dtype=torch.float32, spread=0.1),
        ]  # fmt: skip

    inner = c.q_heads * c.head_dim
    params = [
        norm("attn_norm", names.attn_norm),
        norm("mlp_norm", names.mlp_norm),
        *linear("qkv", names.qkv, c.qkv_rows, c.dim, c.qkv_bias, convert_qkv),
        *linear("out", (names.out,), (c.dim,), inner, c.out_bias),
        *linear("gate_up", names.gate_up, (c.ffn, c.ffn), c.dim, c.mlp_bias),
        *linear("down", (names.down,), (c.dim,), c.ffn, c.mlp_bias),
    ]
    if c.qk_norm == "layer":
        params += head_norm("q_norm", names.q_norm, c.q_heads)
        params += head_norm("k_norm", names.k_norm, c.kv_heads)
    if c.norms == "sandwich":
        params += [norm("attn_after", names.attn_after), norm("mlp_after", names.mlp_after)]
    return params


def norm_param(ours: str, theirs: str, c: DecoderConfig) -> Param:
    """The weight of an RMS norm, fp32."""
    source = (Source(f"{theirs}.weight", (c.dim,), _add_one if c.unit_offset else None),)
    return Param(f"{ours}.weight", source, dtype=torch.float32, spread=0.1, mean=1.0)


def _add_one(x: Tensor) -> Tensor:
    return x.float() + 1


class Projection:
    """y = x W^T + b in the weight's dtype, each row by itself on the CPU.

    weight: [N, K]. bias: fp32 [N] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, backend: Backend) -> None:
        self.bias = bias
        native = backend == "native" and weight.device.type == "cpu"
        if native and weight.dtype != torch.float32:
            raise ValueError(
                f"the native CPU backend multiplies fp32 weights, not {weight.dtype}: choose "
                'dtype fp32 or backend="reference"'
            )
        self._native = Linear(weight, None, backend) if native else None
        self._weight = None if native else weight

    def __call__(self, x: Float[Tensor, "M K"]) -> Float[Tensor, "M N"]:
        y = self._native(x) if self._native is not None else self._multiply(x)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return y.to(x.dtype)

    def _multiply(self, x: Float[Tensor, "M K"]) -> Float[Tensor, "M N"]:
        assert self._weight is not None
        turned = self._weight.T
        return rowwise(lambda rows: rows.to(turned.dtype) @ turned, x)


def norm_rows(x: Float[Tensor, "M K"], weight: Tensor, eps: float, backend: Backend) -> Tensor:
    """RMS norm in fp32, returned in x's dtype. weight: fp32 [K]."""
    return rms_norm(x.float(), weight, eps, backend).to(x.dtype)


def activate(x: Float[Tensor, "M K"], activation: Activation | Literal["gelu"]) -> Tensor:
    """An activation whose rows do not depend on one another."""
    if activation == "silu":
        return rowwise(F.silu, x)
    kind = "tanh" if activation == "gelu_tanh" else "none"
    return rowwise(lambda t: F.gelu(t, approximate=kind), x)


def rowwise(function: Convert, x: Float[Tensor, "M K"]) -> Tensor:
    """A function of rows; on the CPU in tiles, where vectorised loops treat their ends apart."""
    return tiled(function, x) if x.device.type == "cpu" else function(x)


class _Layer:
    """The weights of one layer on a backend, taken out of `w` so that none is held twice."""

    def __init__(self, w: dict[str, Tensor], i: int, backend: Backend) -> None:
        def take(name: str) -> Tensor | None:
            return w.pop(f"layers.{i}.{name}", None)

        def linear(name: str) -> Projection:
            return Projection(w.pop(f"layers.{i}.{name}.weight"), take(f"{name}.bias"), backend)

        self.attn_norm = w.pop(f"layers.{i}.attn_norm.weight")
        self.mlp_norm = w.pop(f"layers.{i}.mlp_norm.weight")
        self.attn_after, self.mlp_after = take("attn_after.weight"), take("mlp_after.weight")
        self.q_norm = take("q_norm.weight"), take("q_norm.bias")
        self.k_norm = take("k_norm.weight"), take("k_norm.bias")
        self.qkv, self.out = linear("qkv"), linear("out")
        self.gate_up, self.down = linear("gate_up"), linear("down")


class Decoder:
    """The layers of a model. `run_layer` is what the engine's loop calls."""

    def __init__(
        self,
        config: DecoderConfig,
        tensors: dict[str, Tensor],
        backend: Backend,
        shard: Shard = WHOLE,
        keep: Callable[[object, int, int], None] | None = None,
    ) -> None:
        """config: of the whole model; tensors: this shard's part. keep: see `LoadOptions`."""
        self.config, self.backend, self._shard = config.part(shard), backend, shard
        self._layers: list[_Layer] = []
        for i in range(config.layers):
            if isinstance(tensors, LayerTensors):
                tensors.bring(i)
            self._layers.append(_Layer(tensors, i, backend))
            if keep is not None:
                keep(self._layers[i], i, config.layers)

    def layer(self, index: int) -> object:
        """What holds the weights of a layer."""
        return self._layers[index]

    def run_layer(self, layer: int, run: SubBatchRun) -> None:
        """One layer over `run.hidden` [M, d], in place of it."""
        w = self._layers[layer]
        run.hidden = run.hidden + self._branch(
            run.hidden, w.attn_norm, w.attn_after, lambda x: self._attend(layer, w, x, run)
        )
        run.hidden = run.hidden + self._branch(
            run.hidden, w.mlp_norm, w.mlp_after, lambda x: self._mlp(w, x)
        )

    def _branch(
        self, hidden: Tensor, weight: Tensor, after: Tensor | None, inner: Convert
    ) -> Tensor:
        """What attention or MLP adds to the residual, with the norms where this model has them."""
        if self.config.norms == "post":
            return self.normed(inner(hidden), weight)
        out = inner(self.normed(hidden, weight))
        return out if after is None else self.normed(out, after)

    def normed(self, x: Float[Tensor, "M d"], weight: Tensor) -> Float[Tensor, "M d"]:
        return norm_rows(x, weight, self.config.norm_eps, self.backend)

    def _attend(self, layer: int, w: _Layer, x: Tensor, run: SubBatchRun) -> Tensor:
        q, k, v = self._heads(w.qkv(x), w, run)
        return self._shard.sum(w.out(run.attention(layer, q, k, v).flatten(1)))

    def _heads(self, qkv: Tensor, w: _Layer, run: SubBatchRun) -> tuple[Tensor, Tensor, Tensor]:
        c, dtype = self.config, qkv.dtype
        if c.qk_norm == "none":
            heads = (c.q_heads, c.kv_heads)
            q, k, v = rotated_heads(qkv, None, run.cos, run.sin, heads, c.norm_eps, self.backend)
        else:
            q, k, v = (x.unflatten(1, (-1, c.head_dim)) for x in qkv.split(c.qkv_rows, 1))
            q, k = _norm_heads(q, *w.q_norm), _norm_heads(k, *w.k_norm)
            q, k = rotate(q, run.cos, run.sin), rotate(k, run.cos, run.sin)
        return q.to(dtype), k.to(dtype), v

    def _mlp(self, w: _Layer, x: Float[Tensor, "M d"]) -> Float[Tensor, "M d"]:
        gate_up = w.gate_up(x)
        if self.backend == "native" and self.config.activation == "silu" and not gate_up.is_cuda:
            return self._shard.sum(w.down(swiglu(gate_up, self.backend)))
        gate, up = gate_up.chunk(2, -1)
        return self._shard.sum(w.down(activate(gate, self.config.activation) * up))


def _norm_heads(
    x: Float[Tensor, "M H D"], weight: Tensor | None, bias: Tensor | None
) -> Float[Tensor, "M H D"]:
    """Layer norm over each head, then the head's own weight and bias [H, D]; eps is Chameleon's."""
    assert weight is not None
    assert bias is not None
    flat = x.float().flatten(0, 1)
    plain = rowwise(lambda t: F.layer_norm(t, (t.shape[-1],), eps=1e-5), flat)
    return (plain.view(x.shape) * weight + bias).to(x.dtype)


def rotary_angles(
    positions: Float[Tensor, "M"], frequencies: Float[Tensor, "h"]
) -> tuple[Float[Tensor, "M h"], Float[Tensor, "M h"]]:
    """cos and sin of position x frequency, fp32."""
    angles = positions.float()[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotary_frequencies(theta: float, dims: int, device: torch.device) -> Float[Tensor, "h"]:
    """theta^(-2i / dims) for i < dims / 2 (Su et al. 2021, section 3.2.2)."""
    exponent = torch.arange(0, dims, 2, dtype=torch.float32, device=device) / dims
    return 1.0 / theta**exponent
