"""Contact sheets: pictures in a grid, each with its caption below."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

CELL, GAP, LINE = 192, 6, 13
LIMIT = 300 * 1024


def contact_sheet(
    images: Float[Tensor, "n 3 h w"], captions: Sequence[str], columns: int, lines: int = 3
) -> Image.Image:
    """A white sheet of pictures with values in 0..1 and captions of at most `lines` lines."""
    height = CELL + lines * LINE + GAP
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * (CELL + GAP), rows * height), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    for i, (pixels, caption) in enumerate(zip(to_bytes(images), captions, strict=True)):
        x, y = i % columns * (CELL + GAP), i // columns * height
        sheet.paste(Image.fromarray(pixels), (x, y))
        text = "\n".join(textwrap.wrap(caption, 34)[:lines])
        draw.multiline_text((x + 2, y + CELL + 1), text, "black", font, spacing=1)
    return sheet


def to_bytes(images: Float[Tensor, "n 3 h w"]) -> np.ndarray:
    pixels = (images.float().clamp(0, 1) * 255).round().byte()
    return np.asarray(pixels.permute(0, 2, 3, 1).cpu().numpy())


def save_sheet(sheet: Image.Image, path: Path) -> None:
    """JPEG at the best quality that keeps the file below 300 KiB."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for quality in (90, 85, 80, 72, 64, 55, 45):
        sheet.save(path, "JPEG", quality=quality, optimize=True)
        if path.stat().st_size < LIMIT:
            return
    raise ValueError(f"{path.name} does not fit into {LIMIT} bytes: show fewer pictures")
