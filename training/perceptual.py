"""A perceptual distance for the tokenizer: shift-tolerant LPIPS on the first four VGG16 slices.

Zhang et al. (2018) for LPIPS, Ghildyal and Liu (2022) for the blurred pooling. The weights come
from the PyPI package stlpips-pytorch (BSD-2-Clause); only training needs them.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import cast

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

_SLICES = {1: (0, 2), 2: (6, 8), 3: (12, 14, 16), 4: (20, 22, 24)}
_BLURS = {2: 5, 3: 11, 4: 19}
_CHECKPOINT = Path("weights") / "vST0.0" / "vgg_shift_tolerant.pth"


def convert(target: Path, package: Path | None = None) -> None:
    """Write the weights needed here as fp16 safetensors (15 MB).

    Raises:
        FileNotFoundError: stlpips-pytorch is neither installed nor at `package`.
    """
    source = (package or _installed()) / _CHECKPOINT
    weights = torch.load(source, map_location="cpu", weights_only=True)
    kept = {k: v for k, v in weights.items() if not k.startswith(("net.slice5", "lin4"))}
    save_file({k.replace(".", "_"): v.half().contiguous() for k, v in kept.items()}, target)


class PerceptualDistance(nn.Module):
    """Mean distance of normalised VGG features of two batches of pictures in 0..1."""

    def __init__(self, weights: Path) -> None:
        super().__init__()
        for name, value in load_file(weights).items():
            self.register_buffer(name, value.float(), persistent=False)

    def forward(
        self, truth: Float[Tensor, "b 3 h w"], image: Float[Tensor, "b 3 h w"]
    ) -> Float[Tensor, ""]:
        with torch.no_grad():
            wanted = self._features(truth)
        levels = zip(wanted, self._features(image), strict=True)
        return torch.stack([self._distance(i, a, b) for i, (a, b) in enumerate(levels)]).sum()

    def _features(self, image: Tensor) -> list[Tensor]:
        x = (image * 2 - 1 - self._get("scaling_layer_shift")) / self._get("scaling_layer_scale")
        x = x.to(self._get("net_slice1_0_weight").dtype)
        levels = []
        for number, layers in _SLICES.items():
            x = self._slice(x if number == 1 else self._pool(x, number), number, layers)
            levels.append(x)
        return levels

    def _slice(self, x: Tensor, number: int, layers: tuple[int, ...]) -> Tensor:
        for layer in layers:
            name = f"net_slice{number}_{layer}"
            weight, bias = self._get(f"{name}_weight"), self._get(f"{name}_bias")
            x = F.relu(F.conv2d(x, weight, bias, padding=1))
        return x

    def _pool(self, x: Tensor, number: int) -> Tensor:
        blur = self._get(f"net_slice{number}_{_BLURS[number]}_filt")
        x = F.pad(F.max_pool2d(x, 2, 1), (1, 1, 1, 1), mode="reflect")
        return F.conv2d(x, blur, stride=2, groups=x.shape[1])

    def _distance(self, level: int, a: Tensor, b: Tensor) -> Tensor:
        """LPIPS's learnt weights plus a quarter of the plain distance."""
        squared = (_unit(a) - _unit(b)).float().square()
        weight = self._get(f"lin{level}_model_1_weight").float().abs()
        return ((weight + 0.25) * squared).sum(1).mean()

    def _get(self, name: str) -> Tensor:
        return cast(Tensor, getattr(self, name))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.float().square().sum(1, keepdim=True) + 1e-6).to(x.dtype)


def _installed() -> Path:
    spec = find_spec("stlpips_pytorch")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("install stlpips-pytorch, whose VGG weights the tokenizer needs")
    return Path(spec.origin).parent
