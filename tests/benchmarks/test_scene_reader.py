"""The reader of scenes on made-up sprites, where the truth is known."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.scene_reader import Reader, score
from training.lexicon import COLORS
from training.sprites import Sprite, SpritePack


def disc(color: tuple[int, int, int], hole: bool = False) -> Image.Image:
    y, x = np.mgrid[-1:1:160j, -1:1:160j]
    away = np.hypot(x, y)
    alpha = (away < 0.9) & ~(hole & (away < 0.45))
    return Image.fromarray(
        np.concatenate([np.tile(np.array(color, np.uint8), (160, 160, 1)),
                        (255 * alpha)[..., None].astype(np.uint8)], -1))  # fmt: skip


LOOKS = (
    (0, 0, disc((220, 40, 40))), (0, 1, disc((30, 20, 60))), (1, 0, disc((20, 60, 200), True))
)  # fmt: skip


def pack() -> SpritePack:
    """Two concepts, one of them in two styles."""
    blob, sprites = b"", []
    for concept, style, picture in LOOKS:
        data = io.BytesIO()
        picture.save(data, "WEBP", lossless=True)
        sprites.append(Sprite(concept, style, None, (0, 0, 0), len(blob), len(data.getvalue())))
        blob += data.getvalue()
    return SpritePack(("flat", "dark"), ("ball", "ring"), tuple(sprites), blob)


PACK = pack()


def scene(back: str, *placed: tuple[int, int, int, int]) -> torch.Tensor:
    """(sprite, size, x, y) on a plain background."""
    canvas = Image.new("RGB", (192, 192), COLORS[back])
    for number, size, x, y in placed:
        sprite = PACK.image(number).resize((size, size))
        canvas.paste(sprite, (x, y), sprite)
    return torch.from_numpy(np.asarray(canvas).copy()).permute(2, 0, 1).float() / 255


def truth(objects: list[tuple[str, int, str]], relation: str | None = None) -> dict[str, Any]:
    return {
        "objects": [{"concept": c, "count": n, "style": s} for c, n, s in objects],
        "relation": relation, "region": None, "background": {"kind": "plain", "colors": ["yellow"]},
    }  # fmt: skip


BOTH = (0, 64, 8, 64), (2, 72, 112, 64)


@pytest.mark.parametrize(
    ("placed", "objects", "relation", "wanted"),
    [
        (BOTH, [("ball", 1, "flat"), ("ring", 1, "flat")], "left", {"right": 1.0, "scene": 1.0}),
        (BOTH, [("ball", 1, "flat"), ("ring", 1, "flat")], "right", {"places": 0, "objects": 1}),
        (BOTH, [("ball", 1, "dark")], None, {"objects": 1, "styles": 0, "right": 0}),
        (BOTH, [("ball", 2, "flat")], None, {"counts": 0, "styles": 1}),
        (((0, 56, 8, 8), (0, 56, 120, 120)), [("ball", 2, "flat")], None, {"right": 1}),
        (((2, 64, 8, 8),), [("ball", 1, "flat")], None, {"objects": 0, "background": 1}),
        ((), [("ring", 1, "flat")], None, {"objects": 0, "counts": 0, "scene": 0.25}),
    ],
)
def test_what_is_read(
    placed: Any, objects: Any, relation: str | None, wanted: dict[str, float]
) -> None:
    found = score(truth(objects, relation), scene("yellow", *placed), Reader(PACK))
    assert {name: found[name] for name in wanted} == wanted


def test_another_background_is_seen() -> None:
    found = score(truth([("ball", 1, "flat")]), scene("teal", BOTH[0]), Reader(PACK))
    assert found["background"] == 0 and found["objects"] == 1
