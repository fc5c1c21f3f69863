"""The pixel decoder of Emu3: a video decoder of which pictures use the first frame alone.

Its convolutions are causal in time and nothing of a first frame comes from later ones, so that of
every temporal kernel only the last tap matters: the decoder is kept in two dimensions. Norms are
scaled and shifted by the code vectors (MoVQ: Zheng et al. 2022).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from engine.checkpoint import Convert, Param, Source
from engine.models.strips import conv_by_strips
from engine.models.vqgan import (
    EPS,
    GROUPS,
    double,
    group_affine,
    largest_activation,
    module_param,
)


@dataclass(frozen=True)
class Emu3VQConfig:
    """vq_config of the family; `channel_multiplier` begins with the finest level."""

    codebook_size: int = 32768
    embed_dim: int = 4
    latent_channels: int = 4
    out_channels: int = 3
    temporal_downsample_factor: int = 4
    base_channels: int = 256
    channel_multiplier: tuple[int, ...] = (1, 2, 2, 4)
    num_res_blocks: int = 2
    attn_resolutions: tuple[int, ...] = (3,)
    num_attention_heads: int = 1

    @property
    def factor(self) -> int:
        """Pixels per side of one token."""
        return int(2 ** (len(self.channel_multiplier) - 1))


class FrozenBatchNorm(nn.Module):
    """Batch norm with the statistics of training."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(
            x, cast(Tensor, self.running_mean), cast(Tensor, self.running_var),
            cast(Tensor, self.weight), cast(Tensor, self.bias), eps=1e-5,
        )  # fmt: skip


class TimeBlock(nn.Module):
    """A residual block of the temporal stack, in two dimensions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = FrozenBatchNorm(channels), FrozenBatchNorm(channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        return cast(Tensor, x + self.conv2(F.silu(self.norm2(h))))


class SpatialNorm(nn.Module):
    """Group norm, scaled and shifted place by place from the code vectors."""

    def __init__(self, channels: int, code_dim: int) -> None:
        super().__init__()
        self.norm_layer = nn.GroupNorm(GROUPS, channels, eps=EPS)
        self.conv_y = nn.Conv2d(code_dim, channels, 1)
        self.conv_b = nn.Conv2d(code_dim, channels, 1)

    def forward(self, x: Tensor, codes: Tensor) -> Tensor:
        near = nearest(codes, x)
        return cast(Tensor, self.norm_layer(x) * self.conv_y(near) + self.conv_b(near))


def nearest(codes: Tensor, like: Tensor) -> Tensor:
    """Code vectors at the resolution of `like`."""
    return F.interpolate(codes, size=like.shape[-2:], mode="nearest")


def norm_conv(x: Tensor, norm: SpatialNorm, conv: nn.Conv2d, codes: Tensor, strips: int) -> Tensor:
    """conv(silu(spatial norm)), with the normalised activation held for one strip at a time."""
    if strips == 1:
        return conv_by_strips(norm(x, codes), conv, 1, lambda part, _: F.silu(part))
    scale, shift = group_affine(x, norm.norm_layer)
    near = nearest(codes, x)

    def before(part: Tensor, rows: slice) -> Tensor:
        at = near[:, :, rows]
        return F.silu((part * scale + shift) * norm.conv_y(at) + norm.conv_b(at))

    return conv_by_strips(x, conv, strips, before)


class ResBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, code_dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = SpatialNorm(inputs, code_dim), SpatialNorm(outputs, code_dim)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        if inputs != outputs:
            self.nin_shortcut = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, codes: Tensor, strips: int) -> Tensor:
        h = norm_conv(x, self.norm1, self.conv1, codes, strips)
        h = norm_conv(h, self.norm2, self.conv2, codes, strips)
        return h.add_(self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x)


class AttentionBlock(nn.Module):
    """Attention between all places of a level."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(channels, channels) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """x already normalised [B, C, H, W] -> what attention adds to the residual."""
        flat = x.flatten(2).transpose(1, 2)
        q, k, v = (
            p(flat).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return cast(Tensor, self.out_proj(out).transpose(1, 2).reshape(x.shape))


class Middle(nn.Module):
    def __init__(self, channels: int, c: Emu3VQConfig) -> None:
        super().__init__()
        self.block_1 = ResBlock(channels, channels, c.embed_dim)
        self.attn_1 = AttentionBlock(channels, c.num_attention_heads)
        self.attn_norm = SpatialNorm(channels, c.embed_dim)
        self.block_2 = ResBlock(channels, channels, c.embed_dim)

    def forward(self, x: Tensor, codes: Tensor) -> Tensor:
        x = self.block_1(x, codes, 1)
        x = x + self.attn_1(self.attn_norm(x, codes))
        return cast(Tensor, self.block_2(x, codes, 1))


class Level(nn.Module):
    """The blocks of one resolution, and the step to the next finer one."""

    def __init__(
        self, inputs: int, outputs: int, c: Emu3VQConfig, attention: bool, up: bool
    ) -> None:
        super().__init__()
        blocks = c.num_res_blocks + 1
        widths = [inputs] + [outputs] * blocks
        self.block = nn.ModuleList(ResBlock(a, outputs, c.embed_dim) for a in widths[:-1])
        count = blocks * attention
        heads = c.num_attention_heads
        self.attn = nn.ModuleList(AttentionBlock(outputs, heads) for _ in range(count))
        self.attn_norms = nn.ModuleList(SpatialNorm(outputs, c.embed_dim) for _ in range(count))
        if up:
            self.upsample = nn.Module()
            self.upsample.conv = nn.Conv2d(outputs, outputs, 3, padding=1)

    def steps(self, codes: Tensor, strips: int) -> Iterator[Convert]:
        """What to apply in turn. The caller keeps no activation that a step has replaced."""
        for i, block in enumerate(self.block):
            yield partial(block, codes=codes, strips=strips)
            if len(self.attn):
                yield partial(self._attend, index=i, codes=codes)
        if hasattr(self, "upsample"):
            conv = cast(nn.Conv2d, self.upsample.conv)
            yield lambda x: conv_by_strips(x, conv, strips, double)

    def _attend(self, x: Tensor, index: int, codes: Tensor) -> Tensor:
        return cast(Tensor, x + self.attn[index](self.attn_norms[index](x, codes)))


class _Inner(nn.Module):
    """The part that checkpoints call `decoder`."""

    def __init__(self, c: Emu3VQConfig) -> None:
        super().__init__()
        latent, top = c.latent_channels, c.base_channels * c.channel_multiplier[-1]
        steps = c.temporal_downsample_factor.bit_length() - 1
        self.time_res_stack = nn.ModuleList(TimeBlock(latent) for _ in range(c.num_res_blocks))
        self.time_conv = nn.ModuleList(_TimeUp(latent) for _ in range(steps))
        self.conv_in = nn.Conv2d(latent, top, 3, padding=1)
        self.middle_block = Middle(top, c)
        levels, width = list[nn.Module](), top
        for i in reversed(range(len(c.channel_multiplier))):
            outputs = c.base_channels * c.channel_multiplier[i]
            levels.insert(0, Level(width, outputs, c, i in c.attn_resolutions, i > 0))
            width = outputs
        self.up_block = nn.Module()
        self.up_block.up = nn.ModuleList(levels)
        self.norm_out = SpatialNorm(width, c.embed_dim)
        self.conv_out = nn.Conv2d(width, c.out_channels, 3, padding=1)

    def forward(self, latents: Tensor, codes: Tensor, strips: int) -> Tensor:
        both = torch.cat([latents, codes])
        for block in self.time_res_stack:
            both = block(both)
        for step in self.time_conv:
            both = F.silu(step(both))
        latents, codes = both.chunk(2)
        x = self.middle_block(self.conv_in(latents), codes)
        for level in reversed(cast(nn.ModuleList, self.up_block.up)):
            for apply in cast(Level, level).steps(codes, strips):
                x = apply(x)
        return norm_conv(x, self.norm_out, self.conv_out, codes, strips)


class _TimeUp(nn.Module):
    """Upsampling in time, of which the first frame sees one tap of a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Module()
        self.conv.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, cast(nn.Conv2d, self.conv.conv)(x))


class Emu3VQDecoder(nn.Module):
    """Tokens of a grid -> pixels around -1..1."""

    def __init__(self, config: Emu3VQConfig) -> None:
        super().__init__()
        self.config = c = config
        self.codes = nn.Embedding(c.codebook_size, c.embed_dim)
        self.post_quant_conv = nn.Conv2d(c.embed_dim, c.latent_channels, 1)
        self.decoder = _Inner(c)

    def forward(
        self, tokens: Int64[Tensor, "B H W"], strips: int = 1
    ) -> Float[Tensor, "B 3 height width"]:
        """See `VQGANDecoder.forward`."""
        codes = self.codes(tokens).permute(0, 3, 1, 2).contiguous()
        return cast(Tensor, self.decoder(self.post_quant_conv(codes), codes, strips))

    def activation_bytes(self, height: int, width: int) -> int:
        """Bytes of the largest activation of one picture of height x width tokens."""
        c = self.config
        return largest_activation(c.base_channels, c.channel_multiplier) * height * width


def emu3_vq_params(c: Emu3VQConfig, prefix: str, ours: str = "vq.") -> list[Param]:
    """What the decoder keeps (all fp32), and where a transformers checkpoint has it."""
    with torch.device("meta"):
        module = Emu3VQDecoder(c)
    return [
        _param(ours + key, _theirs(key, prefix), tuple(tensor.shape))
        for key, tensor in module.state_dict().items()
    ]


def _theirs(key: str, prefix: str) -> str:
    key = key.replace("codes.", "quantize.embedding.")
    key = key.replace("post_quant_conv.", "post_quant_conv.conv.")
    parts = key.split(".")
    if "time_res_stack" in parts and parts[3].startswith("conv"):
        parts.insert(4, "conv")
    return prefix + ".".join(parts)


def _param(ours: str, theirs: str, shape: tuple[int, ...]) -> Param:
    temporal = ".time_" in ours or ours.startswith("vq.post_quant_conv")
    if not (temporal and len(shape) == 4):
        return module_param(ours, theirs, shape)
    source = (Source(theirs, (*shape[:2], 3, *shape[2:]), _last_tap),)
    fan_in = torch.Size(shape[1:]).numel()
    return Param(
        ours, source, tail=shape[1:], dtype=torch.float32,
        spread=(shape[-1] / fan_in) ** 0.5,
    )  # fmt: skip


def _last_tap(weight: Tensor) -> Tensor:
    return weight[:, :, -1]
