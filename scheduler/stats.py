"""What the scheduler counts, for metrics."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Totals:
    """Counted since the start. `parked` counts parkings: an image may be parked several times.

    steps: steps committed. tokens: visual tokens drawn, those of parked images each time.
    """

    steps: int = 0
    tokens: int = 0
    finished: int = 0
    failed: int = 0
    aborted: int = 0
    parked: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A snapshot. Images that have not ended = running + waiting + parked.

    running: images that hold cache. waiting: images that have not started.
    parked: batch images that made room and wait to start again.
    used_bytes, total_bytes, largest_free_bytes: of the cache arena.
    """

    running: int
    waiting: int
    parked: int
    used_bytes: int
    total_bytes: int
    largest_free_bytes: int
    totals: Totals = field(default_factory=Totals)
