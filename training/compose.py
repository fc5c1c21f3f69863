"""Draws scenes on any device: backgrounds, then sprites that were scaled beforehand."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.nn import functional as F

from training.scenes import CANVAS, KINDS, MAX_SLOTS, SIZES, SceneBatch
from training.sprites import SpritePack


@dataclass(frozen=True)
class Atlas:
    """Sprites in every size of `SIZES`, premultiplied RGBA, one int32 a pixel."""

    pixels: Int[Tensor, " n"]
    sprite_row: Int[Tensor, " sprites"]
    size_start: Int[Tensor, " sizes"]

    @property
    def device(self) -> torch.device:
        return self.pixels.device


def build_atlas(pack: SpritePack, device: torch.device, used: Iterable[int] | None = None) -> Atlas:
    """Scale the sprites `used` (default: all of them) to every size."""
    indices = sorted(range(len(pack.sprites)) if used is None else set(used))
    rows = torch.full((len(pack.sprites),), -1, dtype=torch.long)
    rows[indices] = torch.arange(len(indices))
    levels: list[list[Tensor]] = [[] for _ in SIZES]
    for start in range(0, len(indices), 256):
        source = _premultiplied(pack, indices[start : start + 256], device)
        for level, size in zip(levels, SIZES, strict=True):
            level.append(_scaled(source, size))
    starts = np.cumsum([0] + [len(indices) * size**2 for size in SIZES[:-1]])
    pixels = torch.cat([part for level in levels for part in level])
    return Atlas(pixels, rows.to(device), torch.from_numpy(starts).to(device))


def compose(
    atlas: Atlas, slots: Int[Tensor, "b slots 4"], background: Float[Tensor, "b 9"]
) -> Float[Tensor, "b 3 192 192"]:
    """Pictures in 0..1, float32, channels last in memory."""
    image = _background(background)
    for slot in range(slots.shape[1]):
        on = (slots[:, slot, 1] > 0).nonzero()[:, 0]
        if len(on):
            image[on] = _over(_sprite_layer(atlas, slots[on, slot].long()), image[on])
    return image.permute(0, 3, 1, 2)


def compose_batch(atlas: Atlas, batch: SceneBatch) -> Float[Tensor, "b 3 192 192"]:
    """`compose` for arrays on the host."""
    slots, background = torch.from_numpy(batch.slots), torch.from_numpy(batch.background)
    return compose(atlas, slots.to(atlas.device), background.to(atlas.device))


def sprites_used(batch: SceneBatch) -> set[int]:
    """Indices of the sprites a batch shows."""
    return set(batch.slots[..., 0][batch.slots[..., 1] > 0].tolist())


def _premultiplied(
    pack: SpritePack, indices: list[int], device: torch.device
) -> Float[Tensor, "n 4 s s"]:
    images = np.stack([np.asarray(pack.image(i)) for i in indices])
    x = torch.from_numpy(images).to(device).permute(0, 3, 1, 2).float() / 255
    return torch.cat([x[:, :3] * x[:, 3:], x[:, 3:]], 1)


def _scaled(source: Float[Tensor, "n 4 s s"], size: int) -> Int[Tensor, " m"]:
    y = F.interpolate(source, (size, size), mode="bilinear", antialias=True)
    packed: UInt8[Tensor, "n size size 4"] = (y * 255).round().byte().permute(0, 2, 3, 1)
    return packed.contiguous().view(torch.int32).flatten()


def _sprite_layer(atlas: Atlas, slot: Int[Tensor, "b 4"]) -> Float[Tensor, "b 192 192 4"]:
    """One sprite a picture at its place, transparent elsewhere."""
    sprite, size, left, top = (slot[:, i].view(-1, 1, 1) for i in range(4))
    axis = torch.arange(CANVAS, device=slot.device)
    x, y = axis.view(1, 1, -1) - left, axis.view(1, -1, 1) - top
    inside = (x >= 0) & (x < size) & (y >= 0) & (y < size)
    start = atlas.size_start[(size - SIZES[0]) // 8] + atlas.sprite_row[sprite] * size**2
    flat = torch.where(inside, start + y * size + x, 0)
    layer = atlas.pixels[flat].view(torch.uint8).view(*flat.shape, 4)
    return layer.float() / 255 * inside[..., None]


def _over(
    layer: Float[Tensor, "b h w 4"], image: Float[Tensor, "b h w 3"]
) -> Float[Tensor, "b h w 3"]:
    return layer[..., :3] + image * (1 - layer[..., 3:])


def _background(spec: Float[Tensor, "b 9"]) -> Float[Tensor, "b 192 192 3"]:
    kind, horizontal, cell = (spec[:, i].view(-1, 1, 1, 1) for i in (0, 7, 8))
    first, second = spec[:, 1:4].view(-1, 1, 1, 3), spec[:, 4:7].view(-1, 1, 1, 3)
    axis = torch.arange(CANVAS, device=spec.device) + 0.5
    x, y = axis.view(1, 1, -1, 1), axis.view(1, -1, 1, 1)
    along = torch.where(horizontal > 0, x, y)
    stripes = (along / cell).floor() % 2
    squares = ((x / cell).floor() + (y / cell).floor()) % 2
    share = torch.zeros_like(squares)
    for name, value in (("gradient", along / CANVAS), ("checkered", squares), ("striped", stripes)):
        share = torch.where(kind == KINDS.index(name), value, share)
    return (first + (second - first) * share).clamp(0, 1).contiguous()


__all__ = ["MAX_SLOTS", "Atlas", "build_atlas", "compose", "compose_batch", "sprites_used"]
