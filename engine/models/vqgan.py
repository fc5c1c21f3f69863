"""The pixel decoder of VQGAN (Esser et al., "Taming Transformers", 2021).

Code book, residual blocks, attention at the coarsest level, nearest-neighbour upsampling.

LlamaGen's VQ-8 and VQ-16, Janus and Chameleon use it and differ in their names, in the order in
which they store levels, and in whether codes are normalised. Only the decoder half is kept.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from engine.checkpoint import Convert, Param, Source
from engine.models.strips import conv_by_strips

Layout = Literal["janus", "llamagen", "taming"]
GROUPS, EPS = 32, 1e-6


@dataclass(frozen=True)
class VQGANConfig:
    """Sizes of a decoder; `channel_multiplier` begins with the finest level.

    level_attention: attention after every block of the coarsest level (not only in the middle).
    normalize_codes: code vectors are scaled to length 1.
    """

    codes: int = 16384
    code_dim: int = 8
    latent_channels: int = 256
    base_channels: int = 128
    channel_multiplier: tuple[int, ...] = (1, 1, 2, 2, 4)
    res_blocks: int = 2
    out_channels: int = 3
    level_attention: bool = True
    normalize_codes: bool = True

    @property
    def factor(self) -> int:
        """Pixels per side of one token."""
        return int(2 ** (len(self.channel_multiplier) - 1))


class ResBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = _norm(inputs), _norm(outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        if inputs != outputs:
            self.nin_shortcut = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, strips: int) -> Tensor:
        h = norm_conv(x, self.norm1, self.conv1, strips)
        h = norm_conv(h, self.norm2, self.conv2, strips)
        return h.add_(self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x)


class AttentionBlock(nn.Module):
    """Attention between all places of the coarsest level."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = _norm(channels)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (c(h).flatten(2).transpose(1, 2)[:, None] for c in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v)[:, 0].transpose(1, 2).reshape(x.shape)
        return cast(Tensor, x + self.proj_out(out))


class Level(nn.Module):
    """The blocks of one resolution, and the step to the next finer one."""

    def __init__(self, inputs: int, outputs: int, blocks: int, attention: bool, up: bool) -> None:
        super().__init__()
        widths = [inputs] + [outputs] * blocks
        self.block = nn.ModuleList(ResBlock(a, outputs) for a in widths[:-1])
        self.attn = nn.ModuleList(AttentionBlock(outputs) for _ in range(blocks * attention))
        if up:
            self.upsample = nn.Conv2d(outputs, outputs, 3, padding=1)

    def steps(self, strips: int) -> Iterator[Convert]:
        """What to apply in turn. The caller keeps no activation that a step has replaced."""
        for i, block in enumerate(self.block):
            yield partial(block, strips=strips)
            if len(self.attn):
                yield self.attn[i]
        if hasattr(self, "upsample"):
            yield lambda x: conv_by_strips(x, self.upsample, strips, double)


class VQGANDecoder(nn.Module):
    """Tokens of a grid -> pixels around -1..1."""

    def __init__(self, config: VQGANConfig) -> None:
        super().__init__()
        self.config = c = config
        top = c.base_channels * c.channel_multiplier[-1]
        self.codes = nn.Embedding(c.codes, c.code_dim)
        self.post_quant_conv = nn.Conv2d(c.code_dim, c.latent_channels, 1)
        self.conv_in = nn.Conv2d(c.latent_channels, top, 3, padding=1)
        self.mid = nn.ModuleList([ResBlock(top, top), AttentionBlock(top), ResBlock(top, top)])
        self.levels, width, coarsest = nn.ModuleList(), top, len(c.channel_multiplier) - 1
        for i in reversed(range(coarsest + 1)):
            attention = c.level_attention and i == coarsest
            outputs = c.base_channels * c.channel_multiplier[i]
            self.levels.append(Level(width, outputs, c.res_blocks + 1, attention, i > 0))
            width = outputs
        self.norm_out = _norm(width)
        self.conv_out = nn.Conv2d(width, c.out_channels, 3, padding=1)

    def forward(
        self, tokens: Int64[Tensor, "B H W"], strips: int = 1
    ) -> Float[Tensor, "B 3 height width"]:
        """`strips`: into how many strips of rows the finest convolutions are cut; the result stays
        the same up to rounding, the memory for what lies between shrinks."""
        codes = self.codes(tokens)
        if self.config.normalize_codes:
            codes = F.normalize(codes, dim=-1)
        x = self.conv_in(self.post_quant_conv(codes.permute(0, 3, 1, 2)))
        x = self.mid[2](self.mid[1](self.mid[0](x, 1)), 1)
        for level in self.levels:
            for step in cast(Level, level).steps(strips):
                x = step(x)
        return norm_conv(x, self.norm_out, self.conv_out, strips)

    def activation_bytes(self, height: int, width: int) -> int:
        """Bytes of the largest activation of one picture of height x width tokens."""
        c = self.config
        return largest_activation(c.base_channels, c.channel_multiplier) * height * width


def largest_activation(base: int, multiplier: tuple[int, ...]) -> int:
    """Bytes per token of the largest fp32 activation; a level begins as wide as the one below."""
    finest = len(multiplier) - 1
    widths = (base * max(multiplier[i : i + 2]) * 4 ** (finest - i) for i in range(finest + 1))
    return int(max(widths)) * 4


def norm_conv(x: Tensor, norm: nn.GroupNorm, conv: nn.Conv2d, strips: int) -> Tensor:
    """conv(silu(group norm)), with the normalised activation held for one strip at a time."""
    if strips == 1:
        return conv_by_strips(norm(x), conv, 1, lambda part, _: F.silu(part))
    scale, shift = group_affine(x, norm)
    return conv_by_strips(x, conv, strips, lambda part, _: F.silu(part * scale + shift))


def group_affine(x: Tensor, norm: nn.GroupNorm) -> tuple[Tensor, Tensor]:
    """Scale and shift [B, C, 1, 1] that a group norm comes to on x."""
    grouped = x.reshape(len(x), norm.num_groups, -1)
    variance, mean = torch.var_mean(grouped, dim=-1, correction=0)
    repeat = x.shape[1] // norm.num_groups
    inverse = (variance + norm.eps).rsqrt().repeat_interleave(repeat, 1)
    scale = inverse * norm.weight
    shift = norm.bias - mean.repeat_interleave(repeat, 1) * scale
    return scale[:, :, None, None], shift[:, :, None, None]


def double(x: Tensor, _rows: slice) -> Tensor:
    """Every place twice in both directions."""
    return F.interpolate(x, scale_factor=2.0, mode="nearest")


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(GROUPS, channels, eps=EPS)


def vqgan_params(c: VQGANConfig, layout: Layout, prefix: str, ours: str = "vq.") -> list[Param]:
    """What the decoder keeps (all fp32), and where a checkpoint of a layout has it."""
    with torch.device("meta"):
        module = VQGANDecoder(c)
    name = _namer(c, layout, prefix)
    return [
        module_param(ours + key, name(key), tuple(tensor.shape))
        for key, tensor in module.state_dict().items()
    ]


def module_param(ours: str, theirs: str, shape: tuple[int, ...]) -> Param:
    """A parameter of a pixel decoder, fp32; norms start around 1 where weights are random."""
    norm = "norm" in ours and ours.endswith("weight") and len(shape) == 1
    spread = 0.1 if len(shape) == 1 else (shape[-1] / max(1, torch.Size(shape[1:]).numel())) ** 0.5
    source = (Source(theirs, shape),)
    return Param(ours, source, dtype=torch.float32, spread=spread, mean=1.0 if norm else 0.0)


def _namer(c: VQGANConfig, layout: Layout, prefix: str) -> Callable[[str], str]:
    """Our names -> the layout's."""
    coarsest = len(c.channel_multiplier) - 1
    mid = ("0", "1", "2") if layout == "llamagen" else ("block_1", "attn_1", "block_2")

    def name(key: str) -> str:
        if key.startswith("codes."):
            return f"{prefix}quantize.embedding.{key.removeprefix('codes.')}"
        if key.startswith("post_quant_conv."):
            return prefix + key
        part, *rest = key.split(".")
        if part == "mid":
            rest[0] = mid[int(rest[0])]
        if part == "levels":
            part = "conv_blocks" if layout == "llamagen" else "up"
            rest[0] = str(coarsest - int(rest[0])) if layout == "taming" else rest[0]
            if rest[1] == "upsample":
                rest.insert(2, "conv")
            if rest[1] == "block" and layout == "llamagen":
                rest[1] = "res"
        return ".".join([prefix + "decoder", part, *rest])

    return name
