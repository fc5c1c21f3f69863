"""Independent VQGAN decoders, written from the published architecture.

Esser et al. 2021 (as in taming-transformers) and LlamaGen's variant (Sun et al. 2024), with the
names of their checkpoints.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def _norm(x: Tensor, p: nn.ParameterDict | dict[str, Tensor], at: str) -> Tensor:
    return F.group_norm(x, 32, p[f"{at}.weight"], p[f"{at}.bias"], 1e-6)


class Reference:
    """A decoder as a dictionary of tensors and a walk over it."""

    def __init__(self, tensors: dict[str, Tensor], kind: Literal["taming", "llamagen"], levels: int,
                 blocks: int, normalize: bool) -> None:  # fmt: skip
        self.w, self.kind, self.levels, self.blocks = tensors, kind, levels, blocks
        self.normalize = normalize

    def state_dict(self) -> dict[str, Tensor]:
        return self.w

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        self.w = tensors

    def conv(self, x: Tensor, at: str) -> Tensor:
        weight = self.w[f"{at}.weight"]
        return F.conv2d(x, weight, self.w[f"{at}.bias"], padding=weight.shape[-1] // 2)

    def swish_conv(self, x: Tensor, norm: str, conv: str) -> Tensor:
        h = _norm(x, self.w, norm)
        return self.conv(h * torch.sigmoid(h), conv)

    def residual(self, x: Tensor, at: str) -> Tensor:
        h = self.swish_conv(x, f"{at}.norm1", f"{at}.conv1")
        h = self.swish_conv(h, f"{at}.norm2", f"{at}.conv2")
        skip = f"{at}.nin_shortcut"
        return h + (self.conv(x, skip) if f"{skip}.weight" in self.w else x)

    def attention(self, x: Tensor, at: str) -> Tensor:
        b, c, height, width = x.shape
        h = _norm(x, self.w, f"{at}.norm")
        q, k, v = (self.conv(h, f"{at}.{n}").reshape(b, c, -1) for n in "qkv")
        scores = torch.einsum("bci,bcj->bij", q, k) / c**0.5
        out = torch.einsum("bij,bcj->bci", scores.softmax(-1), v)
        return x + self.conv(out.reshape(b, c, height, width), f"{at}.proj_out")

    def __call__(self, tokens: Tensor) -> Tensor:
        codes = self.w["quantize.embedding.weight"]
        if self.normalize:
            codes = codes / codes.norm(dim=1, keepdim=True)
        x = self.conv(codes[tokens].permute(0, 3, 1, 2), "post_quant_conv")
        x = self.conv(x, "decoder.conv_in")
        mid = ("block_1", "attn_1", "block_2") if self.kind == "taming" else ("0", "1", "2")
        x = self.residual(x, f"decoder.mid.{mid[0]}")
        x = self.attention(x, f"decoder.mid.{mid[1]}")
        x = self.residual(x, f"decoder.mid.{mid[2]}")
        for step in range(self.levels):
            if self.kind == "taming":
                at, res = f"decoder.up.{self.levels - 1 - step}", "block"
            else:
                at, res = f"decoder.conv_blocks.{step}", "res"
            for j in range(self.blocks):
                x = self.residual(x, f"{at}.{res}.{j}")
                if f"{at}.attn.{j}.q.weight" in self.w:
                    x = self.attention(x, f"{at}.attn.{j}")
            if step < self.levels - 1:
                x = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
                x = self.conv(x, f"{at}.upsample.conv")
        return self.swish_conv(x, "decoder.norm_out", "decoder.conv_out")


def taming(codes: int, code_dim: int, latent: int, base: int, multiplier: tuple[int, ...],
           res_blocks: int = 1) -> Reference:  # fmt: skip
    return _random("taming", codes, code_dim, latent, base, multiplier, res_blocks, False)


def llamagen(codes: int, code_dim: int, latent: int, base: int, multiplier: tuple[int, ...],
             res_blocks: int = 2) -> Reference:  # fmt: skip
    return _random("llamagen", codes, code_dim, latent, base, multiplier, res_blocks, True)


def _random(
    kind: Literal["taming", "llamagen"],
    codes: int,
    code_dim: int,
    latent: int,
    base: int,
    multiplier: tuple[int, ...],
    res_blocks: int,
    normalize: bool,
) -> Reference:
    generator = torch.Generator().manual_seed(0)
    w: dict[str, Tensor] = {}

    def conv(at: str, inputs: int, outputs: int, kernel: int) -> None:
        fan = (inputs * kernel**2) ** -0.5
        w[f"{at}.weight"] = torch.randn(outputs, inputs, kernel, kernel, generator=generator) * fan
        w[f"{at}.bias"] = torch.randn(outputs, generator=generator) * 0.1

    def norm(at: str, channels: int) -> None:
        w[f"{at}.weight"] = 1 + 0.1 * torch.randn(channels, generator=generator)
        w[f"{at}.bias"] = 0.1 * torch.randn(channels, generator=generator)

    def residual(at: str, inputs: int, outputs: int) -> None:
        norm(f"{at}.norm1", inputs)
        conv(f"{at}.conv1", inputs, outputs, 3)
        norm(f"{at}.norm2", outputs)
        conv(f"{at}.conv2", outputs, outputs, 3)
        if inputs != outputs:
            conv(f"{at}.nin_shortcut", inputs, outputs, 1)

    def attention(at: str, channels: int) -> None:
        norm(f"{at}.norm", channels)
        for name in ("q", "k", "v", "proj_out"):
            conv(f"{at}.{name}", channels, channels, 1)

    levels, top = len(multiplier), base * multiplier[-1]
    w["quantize.embedding.weight"] = torch.randn(codes, code_dim, generator=generator)
    conv("post_quant_conv", code_dim, latent, 1)
    conv("decoder.conv_in", latent, top, 3)
    taming_names = kind == "taming"
    mid = ("block_1", "attn_1", "block_2") if taming_names else ("0", "1", "2")
    residual(f"decoder.mid.{mid[0]}", top, top)
    attention(f"decoder.mid.{mid[1]}", top)
    residual(f"decoder.mid.{mid[2]}", top, top)
    width = top
    for step in range(levels):
        level = levels - 1 - step
        at = f"decoder.up.{level}" if taming_names else f"decoder.conv_blocks.{step}"
        outputs = base * multiplier[level]
        for j in range(res_blocks + 1):
            residual(f"{at}.{'block' if taming_names else 'res'}.{j}", width, outputs)
            width = outputs
            if not taming_names and step == 0:
                attention(f"{at}.attn.{j}", width)
        if level:
            conv(f"{at}.upsample.conv", width, width, 3)
    norm("decoder.norm_out", width)
    conv("decoder.conv_out", width, 3, 3)
    return Reference(w, kind, levels, res_blocks + 1, normalize)
