"""The contract between scheduler and engine: who runs in a step, at which position, where.

A `StepPlan` is all the engine learns from the scheduler, and a `StepResult` all it reports back.
Both are plain data, so that a run can be recorded and replayed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from scheduler.request import Priority

PREFILL = -1
"""Position of an image whose prompt has not been read yet; its logits give visual token 0."""


@dataclass(frozen=True, slots=True)
class ImageTask:
    """One image as the scheduler sees it: its length and memory, known before it starts.

    image: number of the image, unique in the life of an engine, given in order of arrival.
    request: id of the request it belongs to.
    group: images of one group share a cache layout and run in one sub-batch.
    tokens: N, visual tokens to draw (end-of-row tokens included).
    sequence_bytes: cache bytes of each sequence, the conditional one first.
    """

    image: int
    request: str
    group: str
    tokens: int
    sequence_bytes: tuple[int, ...]
    priority: Priority = Priority.INTERACTIVE

    @property
    def bytes(self) -> int:
        return sum(self.sequence_bytes)


@dataclass(frozen=True, slots=True)
class ImageStep:
    """One image in one step.

    position: visual position t of the token that is fed and whose K, V are stored; the logits
        give token t + 1. `PREFILL` for the first step, which reads the prompt.
    slots: byte offset in the cache arena of each sequence, the conditional one first.
    """

    image: int
    position: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SubBatch:
    """Images that share one pass over each layer: same group, same phase."""

    group: str
    phase: Literal["prefill", "decode"]
    images: tuple[ImageStep, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What to run now.

    step: number of the step, counted from 0.
    sub_batches: in the order they run. Each image occurs at most once.
    released: images that finished, failed, were aborted or parked since the last plan; the engine
        forgets them before the step runs (a parked image starts again from its seed).
    """

    step: int
    sub_batches: tuple[SubBatch, ...]
    released: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What became of a step. Images not named in `failed` advanced by one token."""

    step: int
    failed: Mapping[int, str] = field(default_factory=dict)
