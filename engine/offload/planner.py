"""`plan`: the best placement and block for a model, a policy and a machine, and why."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from engine.offload.cost import CacheCost, Infeasible, Limits, Step, solve, vars_of
from engine.offload.geometry import ModelGeometry
from engine.offload.hardware import Hardware
from engine.offload.placement import Placement
from sparse_attn.format import KVFormat
from sparse_attn.policy import ReadPolicy

MOST_IMAGES = 512
DAY = 86400
BUSY = 0.8
"""Share of its throughput that a machine may be loaded with, so that queues stay short."""

PEAK = 2.0
"""How much busier the busiest hour is than the mean of a day."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The best placement found, what it predicts, and the reasons for it.

    step_seconds: of one decode step of the whole block, mean over the image. image_seconds: of
    one image that runs in a full block. alternatives: the best of every block size, as
    (images, step_seconds, images_per_second). kv_bytes: of the whole block.
    """

    model: str
    hardware: str
    policy: str
    sparsity: float
    kv_format: str
    tokens: int
    images: int
    step: Step
    placement: Placement
    kv_bytes: int
    reasons: tuple[str, ...]
    alternatives: tuple[tuple[int, float, float], ...]
    assumptions: tuple[str, ...]

    @property
    def step_seconds(self) -> float:
        return self.step.seconds

    @property
    def image_seconds(self) -> float:
        return self.tokens * self.step.seconds

    @property
    def images_per_second(self) -> float:
        return self.images / self.image_seconds

    def as_dict(self) -> dict[str, Any]:
        """For JSON: everything above, derived figures included."""
        names = ("step_seconds", "image_seconds", "images_per_second")
        costs = vars_of(self.step.costs) | {"bound": self.step.costs.bound}
        alternatives = [
            {"images": i, "step_seconds": s, "images_per_second": r}
            for i, s, r in self.alternatives
        ]
        kept = {
            name: getattr(self, name)
            for name in (
                "model",
                "hardware",
                "policy",
                "sparsity",
                "kv_format",
                "tokens",
                "images",
                "kv_bytes",
            )
        }
        return (
            kept
            | {name: getattr(self, name) for name in names}
            | {
                "sequences": self.step.sequences,
                "placement": asdict(self.placement),
                "memory_bytes": self.step.memory,
                "layer_seconds": costs,
                "alternatives": alternatives,
                "reasons": list(self.reasons),
                "assumptions": list(self.assumptions),
            }
        )


class PlanError(ValueError):
    """Nothing fits; the message has the numbers."""


def plan(
    geometry: ModelGeometry, policy: ReadPolicy, format: KVFormat, limits: Limits,
    hardware: Hardware, images: int | None = None, most_seconds: float | None = None,
) -> Plan:  # fmt: skip
    """The placement and block with the most images a second.

    images: the block; None chooses it. most_seconds: what an image may take in a full block.
    Raises PlanError if nothing fits, or nothing is fast enough.
    """
    cache = CacheCost.of(policy, geometry, format)
    steps, lack = _steps(geometry, cache, hardware, limits, images)
    if not steps:
        raise PlanError(lack)
    tokens = policy.grid.tokens
    allowed = [s for s in steps if most_seconds is None or tokens * s.seconds <= most_seconds]
    if not allowed:
        quickest = min(tokens * s.seconds for s in steps)
        raise PlanError(
            f"the quickest image takes {quickest:.3g} s on {hardware.name}, more than the "
            f"{most_seconds:.3g} s asked for"
        )
    best = max(allowed, key=lambda s: (s.images / s.seconds, -s.images))
    return Plan(
        geometry.name, hardware.name, policy.name, policy.sparsity, format.name, tokens,
        best.images, best, _placement(best), best.sequences * cache.kept,
        tuple(_reasons(geometry, cache, hardware, best, steps)),
        tuple((s.images, s.seconds, s.images / s.seconds / tokens) for s in steps),
        tuple(_assumptions(hardware)),
    )  # fmt: skip


def _steps(
    geometry: ModelGeometry, cache: CacheCost, hardware: Hardware, limits: Limits,
    images: int | None,
) -> tuple[list[Step], str]:  # fmt: skip
    """The best step of every block size that fits, and why the first that does not fit does not."""
    found, lack = [], ""
    for size in _sizes() if images is None else [images]:
        ways = [False, True] if hardware.gpu is not None else [False]
        options = []
        for cpu_attention in ways:
            try:
                options.append(solve(geometry, cache, hardware, limits, size, cpu_attention))
            except Infeasible as reason:
                lack = lack or str(reason)
        if not options:
            break
        found.append(min(options, key=lambda s: s.seconds))
    return found, lack


def _sizes() -> Iterator[int]:
    """1, 2, 3, 4, 6, 8, 12, ..."""
    size = 1
    while size <= MOST_IMAGES:
        yield size
        if size > 1 and size * 3 // 2 <= MOST_IMAGES:
            yield size * 3 // 2
        size *= 2


def _placement(step: Step) -> Placement:
    return Placement(
        step.weights, step.cache, gpu_batch_size=step.sub_batch,
        num_gpu_batches=step.sub_batches, cpu_cache_compute=step.cpu_attention,
    )  # fmt: skip


def _reasons(
    geometry: ModelGeometry, cache: CacheCost, hardware: Hardware, best: Step, steps: list[Step]
) -> Iterator[str]:
    kept, read = (size * geometry.sequences / 1e9 for size in (cache.kept, cache.read))
    yield (
        f"weights take {geometry.weight_bytes / 1e9:.3g} GB; an image keeps {kept:.3g} GB of KV in "
        f"{geometry.sequences} sequence(s) and reads {read:.3g} GB a step"
    )
    yield f"a step is bound by {WORDS[best.costs.bound]}"
    alone = steps[0]
    if best.images > alone.images:
        gain = best.images / best.seconds * alone.seconds / alone.images
        yield f"a block of {best.images} images draws {gain:.3g} times what a block of 1 does"
    if best is steps[-1] and best.images < MOST_IMAGES:
        yield "larger blocks do not fit the limits"
    elif best.images < steps[-1].images:
        yield "larger blocks fit, but draw no more images a second or take too long for one"
    if best.cpu_attention and best.cache.cpu:
        yield "attention over the KV on the host is quicker there than over the link"
    if best.weights.gpu == best.cache.gpu == 100:
        yield "everything fits the GPU: nothing needs to be offloaded"


WORDS = {
    "compute": "arithmetic and the memory it reads",
    "link_to_gpu": "the link to the GPU",
    "link_from_gpu": "the link from the GPU",
    "host": "the host's memory",
    "disk_read": "reading the disk",
    "disk_write": "writing the disk",
}


def _assumptions(hardware: Hardware) -> Iterator[str]:
    rates = {"host memory": hardware.host_memory}
    if (gpu := hardware.gpu) is not None:
        rates |= {
            "GPU memory": gpu.memory, "GPU arithmetic": gpu.flops, "link to GPU": gpu.to_gpu,
            "link from GPU": gpu.from_gpu,
        }  # fmt: skip
        yield "launches cost nothing (CUDA graphs); reading prompts and decoding pixels neither"
        yield "the GPU path of this plan is predicted, not measured"
    if (disk := hardware.disk) is not None:
        rates |= {"disk read": disk.read, "disk write": disk.write}
    for name, rate in rates.items():
        scale, unit = (1e12, "TFLOP") if name == "GPU arithmetic" else (1e9, "GB")
        reached = f"{100 * rate.share:.0f} % of it reached"
        yield f"{name}: {rate.rate / scale:.4g} {unit}/s, {reached} ({rate.source})"


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many machines of a plan serve a day's images."""

    plan: Plan
    images_per_day: int
    p95_seconds: float

    @property
    def machines(self) -> int:
        """At the peak hour, loaded as far as `BUSY`."""
        peak = self.images_per_day / DAY * PEAK
        return max(1, ceil(peak / (BUSY * self.plan.images_per_second)))

    def as_dict(self) -> dict[str, Any]:
        return {
            "hardware": self.plan.hardware,
            "machines": self.machines,
            "images_per_day": self.images_per_day,
            "p95_seconds": self.p95_seconds,
            "plan": self.plan.as_dict(),
            "assumptions": [
                f"the busiest hour has {PEAK:g} times the mean of the day",
                f"a machine is loaded to {100 * BUSY:.0f} % at most",
                "an image joins at the next step and takes no longer than one of a full block",
            ],
        }
