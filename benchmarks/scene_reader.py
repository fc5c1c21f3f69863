"""Reads scenes of `mini`: which of the asked things a picture shows, how often, where, on what.

    bishop evaluate --suite judge --scorer benchmarks.scene_reader:judge --prompts SCENES ... -o out
    python -m benchmarks.scene_reader        # how often it is right on real held-out scenes

No net: the sprites that scenes are made of are known, so each asked concept is looked for in all of
its styles, sizes and places on the token grid, by how much of a patch its sprite explains. It needs
the sprite pack (training/cache, or $BISHOP_SPRITES).
"""

import json
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import interpolate, unfold

from benchmarks.results_writer import ROOT
from training.lexicon import COLORS
from training.scenes import CANVAS, SIZES
from training.sprites import SpritePack

SCALE = 3
"""Pictures are read at a third of their side; places are then multiples of 8 / 3 pixels, rounded
by drawing the templates at whole sizes and stepping a pixel less than half a token."""
SIDE = CANVAS // SCALE
ENOUGH = 0.5
"""Share of a patch's deviation from the background that a sprite must explain."""
MARGIN = 12
"""Pixels by which one centre must lie beyond the other."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One object. score: share explained. Places are centres in pixels of the picture."""

    style: str
    score: float
    x: float
    y: float
    size: float


class Reader:
    """Looks for concepts in pictures."""

    def __init__(self, pack: SpritePack) -> None:
        self.pack = pack
        self._sprites: dict[str, list[int]] = {}
        for number, sprite in enumerate(pack.sprites):
            self._sprites.setdefault(pack.concepts[sprite.concept], []).append(number)

    def look(self, image: Float[Tensor, "3 h w"], concept: str) -> list[Seen]:
        """The objects of a concept, surest first; none overlaps a surer one."""
        numbers = self._sprites.get(concept, [])
        if not numbers:
            return []
        small = interpolate(image[None], (SIDE, SIDE), mode="area")
        background, sprites = _background(small), self._rgba(numbers)
        styles = [self.pack.styles[self.pack.sprites[n].style] for n in numbers]
        found = [s for size in SIZES for s in _at_size(small, background, sprites, size, styles)]
        return _apart(sorted(found, key=lambda s: -s.score))

    def _rgba(self, numbers: Sequence[int]) -> Float[Tensor, "s 4 h w"]:
        pictures = [np.asarray(self.pack.image(n)).copy() for n in numbers]
        return torch.from_numpy(np.stack(pictures)).float().permute(0, 3, 1, 2) / 255


def _at_size(
    small: Tensor, background: Tensor, sprites: Tensor, size: int, styles: Sequence[str]
) -> list[Seen]:
    """All sprites at all places: what drawing one on the background would miss of the patch, by
    the binomial formula, since a patch less its background is the same for all of them."""
    side, step = round(size / SCALE), 2
    template = interpolate(sprites, (side, side), mode="area")
    alpha = template[:, 3:].expand(-1, 3, -1, -1).flatten(1).T
    color = alpha * template[:, :3].flatten(1).T
    behind = unfold(background, side, stride=step)[0].T
    change = unfold(small, side, stride=step)[0].T - behind
    there = change.square().sum(1, keepdim=True)
    agrees = change @ color - (change * behind) @ alpha
    wanted = color.square().sum(0) - 2 * behind @ (alpha * color) + behind.square() @ alpha.square()
    score = 1 - (there - 2 * agrees + wanted) / torch.maximum(there, 0.5 * wanted).clamp_min(1e-6)
    columns = (SIDE - side) // step + 1
    best = score.topk(min(8, len(score)), 0)
    return [
        Seen(style, float(v), *_center(int(i), columns, side, step), float(size))
        for style, values, places in zip(styles, best.values.T, best.indices.T, strict=True)
        for v, i in zip(values, places, strict=True)
        if v > ENOUGH
    ]


def _center(place: int, columns: int, side: int, step: int) -> tuple[float, float]:
    y, x = divmod(place, columns)
    return SCALE * (x * step + side / 2), SCALE * (y * step + side / 2)


def _background(small: Tensor) -> Tensor:
    """Rows and columns of a scene's background are those of its edges: plain, striped and gradient
    backgrounds follow from the left and top edge alone."""
    left, right = small[..., :, :2].mean(-1), small[..., :, -2:].mean(-1)
    top, bottom = small[..., :2, :].mean(-2), small[..., -2:, :].mean(-2)
    rows, columns = (left + right) / 2, (top + bottom) / 2
    by_row = rows[..., None].expand_as(small)
    by_column = columns[..., None, :].expand_as(small)
    vary = [x.std(-1).sum() for x in (rows, columns)]
    return by_row if vary[0] >= vary[1] else by_column


def _apart(found: Sequence[Seen]) -> list[Seen]:
    kept: list[Seen] = []
    for seen in found:
        near = any(
            max(abs(seen.x - k.x), abs(seen.y - k.y)) < 0.55 * (seen.size + k.size) / 2
            for k in kept
        )
        if not near:
            kept.append(seen)
    return kept


def score(
    truth: Mapping[str, Any], image: Float[Tensor, "3 h w"], reader: Reader
) -> dict[str, float]:
    """Shares of what was asked: objects, counts, styles, places, background; `scene`: their mean;
    `right`: all of it."""
    seen = [reader.look(image, thing["concept"]) for thing in truth["objects"]]
    pairs = list(zip(truth["objects"], seen, strict=True))
    found = {
        "objects": _mean(bool(s) for _, s in pairs),
        "counts": _mean(len(s) == thing["count"] for thing, s in pairs),
        "styles": _mean(bool(s) and s[0].style == thing["style"] for thing, s in pairs),
        "background": float(_colored(image, truth["background"]["colors"])),
    }
    if truth["relation"] in ("left", "right", "above", "below"):
        found["places"] = float(_stands(seen, truth["relation"]))
    return found | {"scene": _mean(found.values()), "right": float(min(found.values()) == 1)}


def _mean(values: Any) -> float:
    listed = [float(v) for v in values]
    return sum(listed) / len(listed)


def _stands(seen: Sequence[Sequence[Seen]], relation: str) -> bool:
    """The first thing to all others."""
    if not all(seen):
        return False
    (x, y), *others = ((_mean(s.x for s in each), _mean(s.y for s in each)) for each in seen)
    away = {"left": [u - x for u, _ in others], "right": [x - u for u, _ in others],
            "above": [v - y for _, v in others], "below": [y - v for _, v in others]}  # fmt: skip
    return min(away[relation]) > MARGIN


def _colored(image: Float[Tensor, "3 h w"], colors: Sequence[str]) -> bool:
    """Whether most of the picture's edge is nearest to one of the named colours; what lies between
    the two of a gradient counts."""
    edge = torch.cat([image[:, :4].flatten(1), image[:, -4:].flatten(1),
                      image[:, :, :4].flatten(1), image[:, :, -4:].flatten(1)], 1)  # fmt: skip
    table = torch.tensor([COLORS[name] for name in COLORS]).float() / 255
    names = list(COLORS)
    nearest = torch.cdist(edge.T, table).argmin(1)
    own = torch.tensor([names.index(c) for c in colors])
    blend = _from_line(edge.T, table[own]) < 0.08
    return bool((torch.isin(nearest, own) | blend).float().mean() > 0.5)


def _from_line(points: Float[Tensor, "n 3"], ends: Float[Tensor, "e 3"]) -> Float[Tensor, "n"]:
    """Distance from the line between two colours, or from one."""
    away = points - ends[0]
    along = ends[-1] - ends[0]
    share = (away @ along / along.square().sum().clamp_min(1e-9)).clamp(0, 1)
    return (away - share[:, None] * along).norm(dim=1)


def judge() -> Any:
    """For `bishop evaluate --suite judge --scorer benchmarks.scene_reader:judge`."""
    reader = Reader(SpritePack.load(Path(os.environ.get("BISHOP_SPRITES", "training/cache"))))

    def scored(facts: Mapping[str, Any], pixels: Any) -> dict[str, float]:
        image = torch.from_numpy(np.asarray(pixels).copy()).permute(2, 0, 1).float() / 255
        return score(facts["truth"], image, reader)

    return scored


def _tokenized(images: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n 3 h w"]:
    """What `mini` could draw at best."""
    from engine.models.mini import Mini
    from engine.models.options import LoadOptions
    from engine.models.presets import load_model

    model = load_model("mini", LoadOptions())
    assert isinstance(model, Mini)
    with torch.inference_mode():
        tokens = torch.cat([model.pixels.encode(part) for part in images.split(8)])
        pixels = torch.cat([model.decode_pixels(part, model.grid) for part in tokens.split(8)])
    return pixels.permute(0, 3, 1, 2).float() / 255


def main() -> None:
    """On real held-out scenes, with their own captions and with those of other scenes."""
    from benchmarks.results_writer import RESULTS, results, write
    from benchmarks.scenes import told, truth
    from training.compose import build_atlas, compose_batch, sprites_used
    from training.scenes import SceneSampler, draw_scenes, to_arrays

    count, seed = 32, 8802
    pack = SpritePack.load(ROOT / "training" / "cache")
    scenes = [s for s in draw_scenes(pack, 4 * count, seed) if told(s, pack)][:count]
    arrays = to_arrays(scenes, SceneSampler(pack, random.Random(seed)).tokenizer)
    images = compose_batch(build_atlas(pack, torch.device("cpu"), sprites_used(arrays)), arrays)
    reader, truths, rows = Reader(pack), [truth(s, pack) for s in scenes], []
    for name, shift, shown in (
        ("its own caption", 0, images),
        ("its own caption, through the image tokenizer", 0, _tokenized(images)),
        ("that of another scene", 1, images),
    ):
        each = [score(truths[(i + shift) % count], image, reader) for i, image in enumerate(shown)]
        names = sorted({n for found in each for n in found})
        means = {n: round(_mean(f[n] for f in each if n in f), 4) for n in names}
        rows.append({"read_with": name, "scenes": count, **means})
        print(json.dumps(rows[-1]), flush=True)
    file = "scene-reader.json"
    write(RESULTS / file, results(file, rows, command="python -m benchmarks.scene_reader"))


if __name__ == "__main__":
    main()
