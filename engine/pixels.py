"""Pictures as files: PNG, JPEG and WebP bytes, and contact sheets."""

import io
from collections.abc import Sequence
from math import ceil, sqrt
from typing import Literal, get_args

import numpy as np
from jaxtyping import UInt8
from PIL import Image
from PIL.PngImagePlugin import PngInfo

Format = Literal["png", "jpeg", "webp"]
FORMATS: tuple[Format, ...] = get_args(Format)
SUFFIXES: dict[str, Format] = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}

GAP = 4
"""Pixels between the pictures of a contact sheet."""

FULL_CHROMA = 90
"""JPEG quality from which colour is stored at full resolution: flat art shows the difference."""


def encode(
    pixels: UInt8[np.ndarray, "height width 3"],
    format: Format,
    quality: int = 100,
    *,
    metadata: dict[str, str] | None = None,
) -> bytes:
    """The picture as a file of `format`.

    quality: 0 (smallest) to 100 (best) for JPEG and WebP; PNG is lossless and ignores it.
    metadata: text chunks of a PNG, by key; nothing is written unless given.

    Raises ValueError for an unknown format, a quality outside 0..100, or metadata on a format
    that has no place for it.
    """
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
    if not 0 <= quality <= 100:
        raise ValueError(f"quality must lie in 0..100, got {quality}")
    if metadata and format != "png":
        raise ValueError(f"{format} files take no metadata here; use png")
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format, **_save_options(format, quality, metadata))
    return buffer.getvalue()


def _save_options(
    format: Format, quality: int, metadata: dict[str, str] | None
) -> dict[str, object]:
    if format == "png":
        return {"pnginfo": _text_chunks(metadata or {})}
    if format == "jpeg":
        return {"quality": max(1, quality), "subsampling": 0 if quality >= FULL_CHROMA else 2}
    return {"quality": quality}


def _text_chunks(metadata: dict[str, str]) -> PngInfo:
    info = PngInfo()
    for key, value in metadata.items():
        info.add_itxt(key, value)
    return info


def grid(
    images: Sequence[UInt8[np.ndarray, "height width 3"]], columns: int | None = None
) -> UInt8[np.ndarray, "sheet_height sheet_width 3"]:
    """A contact sheet, row by row on white, as square as possible unless `columns` is given.

    Raises ValueError if there are no images or their sizes differ.
    """
    if not images:
        raise ValueError("a contact sheet needs at least one image")
    if len({image.shape for image in images}) > 1:
        raise ValueError("the images of a contact sheet must have one size")
    columns = columns or ceil(sqrt(len(images)))
    height, width = images[0].shape[:2]
    rows = ceil(len(images) / columns)
    sheet = np.full((rows * (height + GAP) - GAP, columns * (width + GAP) - GAP, 3), 255, np.uint8)
    for k, image in enumerate(images):
        top, left = k // columns * (height + GAP), k % columns * (width + GAP)
        sheet[top : top + height, left : left + width] = image
    return sheet
