"""The limits within which the scheduler plans."""

from dataclasses import dataclass, fields

CACHE_ALIGNMENT = 256
"""Bytes: every sequence starts on a boundary that any vector load or bulk copy accepts."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits, counted in images because an image is what enters and leaves a step.

    cache_bytes: size of the KV cache arena, in bytes.
    max_images: images in flight at once (FlexGen's block: sub_batch_images x sub-batches).
    max_prefill_images: images whose prompt is read in one step; more wait for the next step, so
        that a burst of arrivals does not stall the pictures being drawn.
    sub_batch_images: most images that share one pass over a layer (FlexGen's gpu_batch_size).
    alignment: bytes; every slot starts on a multiple of it (a whole number of cache entries).
    """

    cache_bytes: int
    max_images: int = 256
    max_prefill_images: int = 8
    sub_batch_images: int = 64
    alignment: int = CACHE_ALIGNMENT

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self)):
            value = getattr(self, name)
            if type(value) is not int:
                raise ValueError(f"{name} must be a whole number, got {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be 1 or more, got {value}")
        if self.cache_bytes < CACHE_ALIGNMENT:
            raise ValueError(
                f"cache_bytes must be {CACHE_ALIGNMENT} or more, got {self.cache_bytes}: "
                "no image fits in that"
            )
