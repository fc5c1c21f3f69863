"""The image tokenizer of `mini`: convolutions around a finite-scalar quantiser.

FSQ: Mentzer et al., "Finite Scalar Quantization: VQ-VAE Made Simple" (2023), section 3.
"""

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Self, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

PATCH = 2
"""Side of the pixel-unshuffled patch the first convolution sees."""


@dataclass(frozen=True)
class FSQTokenizerConfig:
    """Shape of the tokenizer; index 0 is the finest level (1/2 of the image's side)."""

    encoder_channels: tuple[int, ...] = (48, 96, 256)
    encoder_blocks: tuple[int, ...] = (1, 2, 2)
    decoder_channels: tuple[int, ...] = (64, 128, 256)
    decoder_blocks: tuple[int, ...] = (2, 2, 3)
    levels: int = 8
    code_dim: int = 4

    def __post_init__(self) -> None:
        depths = {len(self.encoder_channels), len(self.encoder_blocks)}
        depths |= {len(self.decoder_channels), len(self.decoder_blocks)}
        if len(depths) != 1:
            raise ValueError(f"encoder and decoder need equally many stages, not {sorted(depths)}")
        if self.levels % 2 or self.levels < 2:
            raise ValueError(f"levels must be even and at least 2, not {self.levels}")

    @property
    def factor(self) -> int:
        """Pixels per side of one token."""
        return int(PATCH * 2 ** (len(self.encoder_channels) - 1))

    @property
    def codes(self) -> int:
        """Size of the codebook."""
        return int(self.levels**self.code_dim)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """From `config.json`'s "tokenizer". Raises ValueError on keys that do not exist."""
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown:
            raise ValueError(f"the tokenizer config does not know {unknown}")
        frozen: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
        }
        return cls(**frozen)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class FSQ(nn.Module):
    """Rounds each of `dim` channels to one of `levels` values in [-1, 1)."""

    def __init__(self, levels: int, dim: int) -> None:
        super().__init__()
        self.levels, self.dim = levels, dim

    def forward(self, z: Float[Tensor, "b d h w"]) -> Float[Tensor, "b d h w"]:
        """Quantise with a straight-through gradient."""
        half = (self.levels - 1) * (1 + 1e-3) / 2
        bounded = torch.tanh(z + math.atanh(0.5 / half)) * half - 0.5
        return (bounded + (bounded.round() - bounded).detach()) / (self.levels // 2)

    def indices(self, codes: Float[Tensor, "b d h w"]) -> Int64[Tensor, "b h w"]:
        half = self.levels // 2
        digits = (codes * half + half).round().long()
        return (digits * self._place_values(codes.device)).sum(1)

    def codes(self, indices: Int64[Tensor, "b h w"]) -> Float[Tensor, "b d h w"]:
        digits = indices[:, None] // self._place_values(indices.device) % self.levels
        return digits.float() / (self.levels // 2) - 1

    def _place_values(self, device: torch.device) -> Tensor:
        return (self.levels ** torch.arange(self.dim, device=device)).view(1, -1, 1, 1)


class NormSiLU(nn.Module):
    """RMS norm over channels, then SiLU: local, so a picture's corner ignores the other one."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        with torch.autocast(x.device.type, enabled=False):
            weight = self.weight.to(x.dtype)
            y = F.rms_norm(x.permute(0, 2, 3, 1), weight.shape, weight, 1e-5)
            return F.silu(y).permute(0, 3, 1, 2)


class ResidualBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = NormSiLU(channels), NormSiLU(channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        nn.init.zeros_(self.conv2.weight)
        nn.init.zeros_(cast(Tensor, self.conv2.bias))

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        return cast(Tensor, x + self.conv2(self.norm2(self.conv1(self.norm1(x)))))


class Encoder(nn.Sequential):
    """Pixels in -1..1 -> unbounded code channels."""

    def __init__(self, config: FSQTokenizerConfig) -> None:
        channels, layers = config.encoder_channels, list[nn.Module]()
        for i, (width, blocks) in enumerate(zip(channels, config.encoder_blocks, strict=True)):
            layers.append(_enter(channels[i - 1], width) if i else _patch_in(width))
            layers += [ResidualBlock(width) for _ in range(blocks)]
        super().__init__(
            *layers, NormSiLU(channels[-1]), nn.Conv2d(channels[-1], config.code_dim, 1)
        )


class Decoder(nn.Sequential):
    """Quantised code channels -> pixels in -1..1 (not clamped)."""

    def __init__(self, config: FSQTokenizerConfig) -> None:
        channels = config.decoder_channels
        layers: list[nn.Module] = [nn.Conv2d(config.code_dim, channels[-1], 3, padding=1)]
        for i in reversed(range(len(channels))):
            layers += [ResidualBlock(channels[i]) for _ in range(config.decoder_blocks[i])]
            if i:
                layers.append(_leave(channels[i], channels[i - 1]))
        out = nn.Conv2d(channels[0], 3 * PATCH**2, 3, padding=1)
        super().__init__(*layers, NormSiLU(channels[0]), out, nn.PixelShuffle(PATCH))


def _patch_in(width: int) -> nn.Module:
    conv = nn.Conv2d(3 * PATCH**2, width, 3, padding=1)
    return nn.Sequential(nn.PixelUnshuffle(PATCH), conv)


def _enter(width_in: int, width_out: int) -> nn.Module:
    return nn.Conv2d(width_in, width_out, 4, stride=2, padding=1)


def _leave(width_in: int, width_out: int) -> nn.Module:
    conv = nn.Conv2d(width_in, width_out, 3, padding=1)
    return nn.Sequential(nn.Upsample(scale_factor=2, mode="nearest"), conv)


class FSQTokenizer(nn.Module):
    """Pictures <-> visual tokens; `config.factor` pixels per side and token."""

    def __init__(self, config: FSQTokenizerConfig | None = None) -> None:
        super().__init__()
        self.config = config or FSQTokenizerConfig()
        self.encoder, self.decoder = Encoder(self.config), Decoder(self.config)
        self.fsq = FSQ(self.config.levels, self.config.code_dim)

    def quantize(self, images: Float[Tensor, "b 3 H W"]) -> Float[Tensor, "b d h w"]:
        """Quantised code channels of pictures in 0..1, differentiable."""
        return cast(Tensor, self.fsq(self.encoder(images * 2 - 1).float()))

    def reconstruct(self, codes: Float[Tensor, "b d h w"]) -> Float[Tensor, "b 3 H W"]:
        """Pixels around 0..1 (not clamped), differentiable."""
        return cast(Tensor, self.decoder(codes) * 0.5 + 0.5)

    def encode(self, images: Float[Tensor, "b 3 H W"]) -> Int64[Tensor, "b n"]:
        """Visual tokens in raster order of pictures with values in 0..1.

        Raises:
            ValueError: a side is not a multiple of `config.factor`.
        """
        if images.ndim != 4 or images.shape[1] != 3:
            raise ValueError(f"expected images [B, 3, H, W], not {tuple(images.shape)}")
        if any(side % self.config.factor for side in images.shape[2:]):
            size, factor = tuple(images.shape[2:]), self.config.factor
            raise ValueError(f"image size {size} is not a multiple of {factor} pixels")
        return self.fsq.indices(self.quantize(images)).flatten(1)

    def decode(
        self, tokens: Int64[Tensor, "b n"], height: int, width: int
    ) -> Float[Tensor, "b 3 H W"]:
        """Pixels in 0..1 of `height` x `width` visual tokens in raster order.

        Raises:
            ValueError: the number of tokens is not height x width, or an id is out of range.
        """
        if tokens.ndim != 2 or tokens.shape[1] != height * width:
            expected = f"[B, {height * width}]"
            raise ValueError(f"expected tokens {expected}, not {tuple(tokens.shape)}")
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.config.codes:
            raise ValueError(f"visual tokens must lie in 0..{self.config.codes - 1}")
        codes = self.fsq.codes(tokens.view(-1, height, width))
        dtype = next(self.decoder.parameters()).dtype
        return self.reconstruct(codes.to(dtype)).clamp(0, 1).float()
