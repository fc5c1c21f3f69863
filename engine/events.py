"""What a front end hears of a request, in order, until every image is finished or failed."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import UInt8


@dataclass(frozen=True, slots=True)
class ImageStats:
    """What one image cost.

    tokens: visual tokens drawn. prompt_tokens: tokens of the conditional prompt.
    seconds: from the first step to the last. queue_seconds: from submission to the first step.
    kv_read_bytes: visual KV read by attention, all layers, heads and sequences of the image.
    kv_resident_bytes: visual KV stored for the image's sequences (its size does not change).
    density: keys read / keys dense attention reads, prompt included, mean over the image.
    """

    tokens: int
    prompt_tokens: int
    seconds: float
    queue_seconds: float
    kv_read_bytes: int
    kv_resident_bytes: int
    density: float


@dataclass(frozen=True, slots=True)
class Progress:
    """Image `index` of the request has drawn `done` of `total` tokens."""

    index: int
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Partial:
    """An unfinished picture of image `index`, the `number`-th from 0."""

    index: int
    number: int
    pixels: UInt8[np.ndarray, "height width 3"]


@dataclass(frozen=True, slots=True)
class Finished:
    """Image `index` is done. `seed` alone draws it again."""

    index: int
    seed: int
    pixels: UInt8[np.ndarray, "height width 3"]
    tokens: tuple[int, ...]
    stats: ImageStats


@dataclass(frozen=True, slots=True)
class Failed:
    """Image `index` could not be drawn; the others of the request go on."""

    index: int
    reason: str


Event = Progress | Partial | Finished | Failed
