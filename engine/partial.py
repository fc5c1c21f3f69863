"""Pictures of unfinished images."""

import torch
from jaxtyping import UInt8
from PIL import Image as Pillow
from PIL import ImageFilter
from torch import Tensor

from engine.models.base import VisualModel
from sparse_attn.geometry import Grid


def partial_due(done: int, total: int, wanted: int) -> int | None:
    """Number of the partial picture that is due after `done` of `total` tokens, or None.

    `wanted` partial pictures are spread evenly and none of them is the finished picture.
    """
    for number in range(wanted):
        if done == (number + 1) * total // (wanted + 1):
            return number
    return None


def unfinished(
    model: VisualModel, tokens: list[int], grid: Grid
) -> UInt8[Tensor, "height width 3"]:
    """The picture so far; rows not yet drawn continue the last one, blurred."""
    whole = len(tokens) // grid.stride
    last = tokens[(whole - 1) * grid.stride : whole * grid.stride] if whole else tokens[-1:]
    filled = list(tokens)
    while len(filled) < grid.tokens:
        filled.append(last[len(filled) % len(last)])
    pixels = model.decode_pixels(torch.tensor(filled)[None], grid)[0].cpu()
    return _blur_below(pixels, len(tokens) // grid.stride * pixels.shape[0] // grid.height)


def _blur_below(pixels: UInt8[Tensor, "H W 3"], row: int) -> UInt8[Tensor, "H W 3"]:
    if row >= len(pixels):
        return pixels
    soft = Pillow.fromarray(pixels.numpy()).filter(ImageFilter.GaussianBlur(len(pixels) / 24))
    blurred = torch.frombuffer(bytearray(soft.tobytes()), dtype=torch.uint8).view_as(pixels)
    return torch.cat([pixels[:row], blurred[row:]])
