"""Timed rounds of requests through the real engine, and what they say of a policy."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks.roofline import Ceiling, StepCost
from engine.events import Failed, Finished, ImageStats
from engine.service_api import ImageService
from scheduler.request import ImageRequest, PolicyChoice

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Round:
    """One pass over all requests, submitted at once.

    elapsed: seconds until the last image. latencies: seconds until the last image of each request.
    stats: of every image.
    """

    elapsed: float
    latencies: tuple[float, ...]
    stats: tuple[ImageStats, ...]


def draw(service: ImageService, requests: Sequence[ImageRequest]) -> Round:
    """Raises RuntimeError if an image fails: a benchmark of failures says nothing."""
    start = time.perf_counter()
    ends, stats = [0.0] * len(requests), []
    for index, event in service.run(requests):
        if isinstance(event, Failed):
            raise RuntimeError(f"request {index}: {event.reason}")
        if isinstance(event, Finished):
            ends[index] = time.perf_counter() - start
            stats.append(event.stats)
    return Round(time.perf_counter() - start, tuple(ends), tuple(stats))


@dataclass
class Measured:
    """The rounds of one policy."""

    policy: PolicyChoice
    rounds: list[Round] = field(default_factory=list)

    @property
    def elapsed(self) -> float:
        """Seconds of the median round."""
        return median(each.elapsed for each in self.rounds)

    @property
    def stats(self) -> ImageStats:
        """Of one image; what is read and stored is the same for all of them."""
        return self.rounds[0].stats[0]

    @property
    def images(self) -> int:
        return len(self.rounds[0].stats)

    @property
    def images_per_second(self) -> float:
        return self.images / self.elapsed

    @property
    def tokens(self) -> int:
        return sum(stats.tokens for stats in self.rounds[0].stats)

    def row(self, dense: "Measured", cost: StepCost, ceiling: Ceiling) -> dict[str, Any]:
        """One row of a results file; keys as in vLLM's benchmarks where it has them."""
        latencies = [seconds for each in self.rounds for seconds in each.latencies]
        allowed = cost.tokens_per_second(ceiling)
        reached = self.tokens / self.elapsed
        return {
            "policy": self.policy.name,
            "sparsity": self.policy.sparsity,
            "policy_options": dict(self.policy.options),
            "elapsed_time": self.elapsed,
            "elapsed_times": [each.elapsed for each in self.rounds],
            "num_requests": len(self.rounds[0].latencies),
            "num_images": self.images,
            "total_num_tokens": self.tokens,
            "requests_per_second": len(self.rounds[0].latencies) / self.elapsed,
            "images_per_second": self.images_per_second,
            "tokens_per_second": reached,
            "avg_latency": mean(latencies),
            "percentiles": {str(p): float(np.percentile(latencies, p)) for p in PERCENTILES},
            "kv_read_bytes_per_image": self.stats.kv_read_bytes,
            "kv_resident_bytes_per_image": self.stats.kv_resident_bytes,
            "density": self.stats.density,
            "speedup": self.images_per_second / dense.images_per_second,
            "images_in_flight": cost.images,
            "ceiling_tokens_per_second": allowed,
            "bound": cost.bound(ceiling),
            "share_of_ceiling": reached / allowed,
        }
