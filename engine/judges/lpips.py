"""LPIPS-like distance of pictures: shift-tolerant LPIPS on the first four VGG16 slices.

Zhang et al. (2018) for LPIPS, Ghildyal and Liu (2022) for the blurred pooling. The weights come
from the PyPI package stlpips-pytorch (BSD-2-Clause, extra `quality`).
"""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

_SLICES = {1: (0, 2), 2: (6, 8), 3: (12, 14, 16), 4: (20, 22, 24)}
_BLURS = {2: 5, 3: 11, 4: 19}
_CHECKPOINT = Path("weights") / "vST0.0" / "vgg_shift_tolerant.pth"


class Distance:
    """0 for equal pictures; of the order of .5 for different ones."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = {k: v.float() for k, v in weights.items()}

    @classmethod
    def installed(cls) -> Self:
        """Raises RuntimeError if the package is not there."""
        spec = find_spec("stlpips_pytorch")
        if spec is None or spec.origin is None:
            raise RuntimeError("the LPIPS-like distance needs stlpips-pytorch: pip install it")
        path = Path(spec.origin).parent / _CHECKPOINT
        return cls(torch.load(path, map_location="cpu", weights_only=True))

    def __call__(
        self, one: Float[Tensor, "b 3 h w"], other: Float[Tensor, "b 3 h w"]
    ) -> Float[Tensor, "b"]:
        """Distance of each pair of pictures in 0..1."""
        with torch.inference_mode():
            levels = zip(self._features(one), self._features(other), strict=True)
            parts = [self._compare(i, a, b) for i, (a, b) in enumerate(levels)]
        return torch.stack(parts).sum(0)

    def _features(self, image: Tensor) -> list[Tensor]:
        w = self._weights
        x = (image * 2 - 1 - w["scaling_layer.shift"]) / w["scaling_layer.scale"]
        levels = []
        for number, layers in _SLICES.items():
            x = x if number == 1 else self._pool(x, number)
            for layer in layers:
                name = f"net.slice{number}.{layer}"
                x = F.relu(F.conv2d(x, w[f"{name}.weight"], w[f"{name}.bias"], padding=1))
            levels.append(x)
        return levels

    def _pool(self, x: Tensor, number: int) -> Tensor:
        blur = self._weights[f"net.slice{number}.{_BLURS[number]}.filt"]
        x = F.pad(F.max_pool2d(x, 2, 1), (1, 1, 1, 1), mode="reflect")
        return F.conv2d(x, blur, stride=2, groups=x.shape[1])

    def _compare(self, level: int, a: Tensor, b: Tensor) -> Tensor:
        weight = self._weights[f"lin{level}.model.1.weight"].abs()
        return (weight * (_unit(a) - _unit(b)).square()).sum(1).mean((1, 2))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(1, keepdim=True) + 1e-6)
