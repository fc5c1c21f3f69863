"""A sprite pack drawn here: no package, no network, no cache."""

import colorsys
import io

import numpy as np
import pytest
from PIL import Image, ImageDraw

from training.sprites import SETS, Sprite, SpritePack, look, square

CONCEPTS = (
    "red apple", "banana", "cat face", "dog", "cherries", "ghost", "star", "bus", "fish", "key",
    "rocket", "violin", "tulip", "frog",
)  # fmt: skip


@pytest.fixture(scope="session")
def pack() -> SpritePack:
    """Fourteen concepts in every style, each a disc with a bar of its own colour."""
    styles = tuple(s.style for s in SETS)
    blob, sprites = io.BytesIO(), list[Sprite]()
    for concept in range(len(CONCEPTS)):
        for style in range(len(styles)):
            image = draw_sprite(concept / len(CONCEPTS), style)
            start = blob.tell()
            image.save(blob, "WEBP", quality=90)
            sprites.append(Sprite(concept, style, *look(image), start, blob.tell() - start))
    return SpritePack(styles, CONCEPTS, tuple(sprites), blob.getvalue())


def draw_sprite(hue: float, bars: int) -> Image.Image:
    canvas = Image.new("RGBA", (200, 180))
    draw = ImageDraw.Draw(canvas)
    color = tuple(int(255 * v) for v in colorsys.hsv_to_rgb(hue, 0.8, 0.8))
    draw.ellipse((30, 20, 170, 160), fill=(*color, 255))
    draw.rectangle((60, 60, 70 + 8 * bars, 80), fill=(255, 255, 255, 255))
    found = square(canvas)
    assert found is not None and np.asarray(found).shape == (160, 160, 4)
    return found
