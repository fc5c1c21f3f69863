"""The transformer of `mini` as it is trained; the engine serves the same weights.

Llama-like decoder over 32 text positions, one begin-of-image position and 24 x 24 visual tokens:
pre-RMSNorm, QK norm, SwiGLU, 2-D RoPE, tied head, no biases.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from training.optim import maybe_compile


@dataclass(frozen=True)
class TransformerConfig:
    """The keys of `config.json` that fix the transformer's shape."""

    text_vocab: int
    grid: tuple[int, int] = (24, 24)
    dim: int = 384
    layers: int = 12
    heads: int = 6
    head_dim: int = 64
    ffn: int = 1024
    image_vocab: int = 4096
    text_len: int = 32
    rope_theta: float = 100.0
    norm_eps: float = 1e-6

    @property
    def tokens(self) -> int:
        """Visual tokens of one image."""
        return self.grid[0] * self.grid[1]

    @property
    def prefix(self) -> int:
        """Positions before the first visual token."""
        return self.text_len + 1

    def to_dict(self) -> dict[str, Any]:
        return {"family": "mini", **asdict(self)}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (x.float() * scale).to(x.dtype) * weight.to(x.dtype)


def rope_tables(config: TransformerConfig) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, head_dim / 2]: the first half turns with the row, the rest with the
    column. Text i lies at (-2, i), begin-of-image at (-1, -1), visual token k at its grid place."""
    width, n = config.grid[1], torch.arange(config.tokens)
    text = torch.arange(config.text_len)
    row = torch.cat([torch.full_like(text, -2), torch.tensor([-1]), n // width])
    column = torch.cat([text, torch.tensor([-1]), n % width])
    quarter = config.head_dim // 4
    frequency = config.rope_theta ** (-torch.arange(quarter) / quarter)
    angle = torch.cat([row[:, None] * frequency, column[:, None] * frequency], 1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class RMSNorm(nn.Module):
    """Holds the weight; `rms_norm` computes."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))


class Layer(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        dim, width = config.dim, config.heads * config.head_dim
        self.attn_norm, self.mlp_norm = RMSNorm(dim), RMSNorm(dim)
        self.q_norm, self.k_norm = RMSNorm(config.head_dim), RMSNorm(config.head_dim)
        self.qkv = nn.Linear(dim, 3 * width, bias=False)
        self.out = nn.Linear(width, dim, bias=False)
        self.gate_up = nn.Linear(dim, 2 * config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, dim, bias=False)

    def weights(self) -> tuple[Tensor, ...]:
        """In the order `layer_forward` takes them."""
        norms = (m.weight for m in (self.attn_norm, self.q_norm, self.k_norm, self.mlp_norm))
        return *norms, *(m.weight for m in (self.qkv, self.out, self.gate_up, self.down))


def project_qkv(
    x: Tensor, rope: tuple[Tensor, Tensor], weights: tuple[Tensor, ...], heads: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated q, k and v [B, heads, N, head_dim] of x [B, N, dim]."""
    attn_norm, q_norm, k_norm, _, qkv, *_ = weights
    cos, sin = (table.to(x.dtype) for table in rope)
    y = F.linear(rms_norm(x, attn_norm, eps), qkv)
    q, k, v = y.view(*x.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4)
    q = rotate(rms_norm(q, q_norm, eps), cos, sin)
    return q, rotate(rms_norm(k, k_norm, eps), cos, sin), v


def finish_layer(x: Tensor, mixed: Tensor, weights: tuple[Tensor, ...], eps: float) -> Tensor:
    """Add the attention output `mixed` [B, heads, N, head_dim] and the feed-forward."""
    mlp_norm, _, out, gate_up, down = weights[3:]
    x = x + F.linear(mixed.transpose(1, 2).flatten(2), out)
    gate, up = F.linear(rms_norm(x, mlp_norm, eps), gate_up).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, down)


def layer_forward(
    x: Tensor, cos: Tensor, sin: Tensor, weights: tuple[Tensor, ...], heads: int, eps: float
) -> Tensor:
    """A whole causal layer; free of the module so that one compiled graph serves all layers."""
    q, k, v = project_qkv(x, (cos, sin), weights, heads, eps)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return finish_layer(x, mixed, weights, eps)


class Embed(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        dim = config.dim
        self.text = nn.Embedding(config.text_vocab, dim)
        self.text_position = nn.Parameter(torch.empty(config.text_len, dim))
        self.image = nn.Embedding(config.image_vocab, dim)
        self.begin_image = nn.Parameter(torch.empty(dim))
        self.row = nn.Parameter(torch.empty(config.grid[0], dim))
        self.column = nn.Parameter(torch.empty(config.grid[1], dim))


class MiniTransformer(nn.Module):
    """Predicts visual tokens in raster order behind a caption."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embed(config)
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.layers)])
        self.norm = RMSNorm(config.dim)
        self.layer_forward = layer_forward
        for name, table in zip(("cos", "sin"), rope_tables(config), strict=True):
            self.register_buffer(name, table, persistent=False)
        self._initialize()

    def compile_layers(self, enabled: bool) -> None:
        self.layer_forward = maybe_compile(layer_forward, enabled)

    def target_place(self, first: int, last: int) -> Float[Tensor, "n dim"]:
        """Row plus column embedding of the tokens predicted at image inputs first..last-1."""
        width = self.config.grid[1]
        k = torch.arange(first, last, device=self.cos.device).clamp(max=self.config.tokens - 1)
        return self.embed.row[k // width] + self.embed.column[k % width]

    def embed_prefix(self, text: Int64[Tensor, "b 32"]) -> Float[Tensor, "b 33 dim"]:
        words = self.embed.text(text) + self.embed.text_position
        begin = (self.embed.begin_image + self.target_place(0, 1)).expand(len(text), 1, -1)
        return torch.cat([words, begin], 1)

    def embed_image(self, image: Int64[Tensor, "b n"], start: int = 0) -> Float[Tensor, "b n dim"]:
        """Inputs of visual tokens start..start+n-1; each predicts the token after it."""
        place = self.target_place(start + 1, start + 1 + image.shape[1])
        return cast(Tensor, self.embed.image(image) + place)

    def forward(
        self, text: Int64[Tensor, "b 32"], image: Int64[Tensor, "b 576"]
    ) -> Float[Tensor, "b 576 dim"]:
        """Normed hidden states that predict each visual token, teacher-forced."""
        x = torch.cat([self.embed_prefix(text), self.embed_image(image[:, :-1])], 1)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        for layer in self.layers:
            weights = cast(Layer, layer).weights()
            x = self.layer_forward(x, cos, sin, weights, self.config.heads, self.config.norm_eps)
        x = rms_norm(x, self.norm.weight, self.config.norm_eps)
        return x[:, self.config.text_len :]

    def logits(self, hidden: Float[Tensor, "b n dim"]) -> Float[Tensor, "b n vocab"]:
        return F.linear(hidden, self.embed.image.weight.to(hidden.dtype))

    def _initialize(self) -> None:
        residual = 1 / math.sqrt(2 * self.config.layers)
        for name, p in self.named_parameters():
            if "norm" not in name:
                last = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 * (residual if last else 1))


def token_loss(
    hidden: Float[Tensor, "b n dim"], head: Float[Tensor, "vocab dim"], image: Int64[Tensor, "b n"]
) -> Float[Tensor, ""]:
    """Mean negative log-likelihood of the visual tokens in nats."""
    logits = F.linear(hidden, head.to(hidden.dtype)).float()
    return F.cross_entropy(logits.flatten(0, 1), image.flatten())
