"""What a step costs: FlexGen's cost model (Sheng et al. 2023, section 4.3) for one block.

The time of a layer is the largest of what its link, its disk, its arithmetic and its memory take,
since they overlap; a step is its layers one after another. Where weights and KV live are fractions
of three tiers, and everything is linear in them, so that a linear program finds the best (`solve`).
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any

import pulp

from engine.offload.geometry import ModelGeometry
from engine.offload.hardware import Hardware
from engine.offload.placement import Share
from engine.offload.regions import StagedLayer, read_bytes, written_bytes
from engine.offload.weights import buffer_count
from sparse_attn.format import KVFormat
from sparse_attn.layout import CacheLayout
from sparse_attn.policies.scored import ScoredPolicy
from sparse_attn.policy import ReadPolicy

Fractions = Mapping[str, Any]
"""By tier: numbers, or variables of the program."""

SAMPLES = 16
"""Positions of an image at which streamed bytes are looked at."""

STAGED_SEQUENCES = 32
"""Most sequences of a sub-batch: so many layers of KV are staged at a time, twice."""

SPARE = 0.97
"""Share of a memory that may be planned for; the rest is for what nobody counted."""


@dataclass(frozen=True, slots=True)
class CacheCost:
    """The KV of one sequence, all layers: bytes kept, read a step (mean over the image), streamed a
    step where it is on disk, written a step; bytes of one layer when staged; and the reads of a
    file that a layer takes."""

    kept: int
    read: float
    streamed: float
    written: int
    staged_layer: int
    calls: float

    @classmethod
    def of(cls, policy: ReadPolicy, geometry: ModelGeometry, format: KVFormat) -> "CacheCost":
        layout = CacheLayout.of(policy, geometry.prompt, geometry.head_dim, format)
        entry, steps = format.entry_bytes(geometry.head_dim), policy.grid.tokens - 1
        at = sorted({round(i * (steps - 1) / (SAMPLES - 1)) for i in range(SAMPLES)})
        heads, scored = geometry.layers * geometry.kv_heads, isinstance(policy, ScoredPolicy)
        reads = [policy.read_total(t) * entry + policy.extra_read_bytes(t, entry) for t in at]
        streams = [read_bytes(layout, geometry.prompt, t, scored) for t in at]
        staged = StagedLayer.of(layout, 0)
        runs = [len(staged.reads(geometry.prompt, t, scored)) for t in at]
        prompt = geometry.prompt * heads * entry
        return cls(
            layout.bytes, _mean(reads) + prompt, _mean(streams), written_bytes(layout),
            staged.bytes, _mean(runs) + geometry.kv_heads,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes that may be taken of each memory; disk 0 leaves it out."""

    host: int
    gpu: int = 0
    disk: int = 0

    @property
    def largest(self) -> int:
        return max(self.host, self.gpu)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds a layer keeps each part of the machine busy; they overlap, so the largest counts."""

    compute: float
    link_to_gpu: float = 0.0
    link_from_gpu: float = 0.0
    host: float = 0.0
    disk_read: float = 0.0
    disk_write: float = 0.0

    @property
    def layer(self) -> float:
        return max(vars_of(self).values())

    @property
    def bound(self) -> str:
        """Which part is the slowest."""
        parts = vars_of(self)
        return max(parts, key=lambda name: parts[name])


def vars_of(costs: Costs) -> dict[str, float]:
    return {name: getattr(costs, name) for name in costs.__slots__}


@dataclass(frozen=True, slots=True)
class Step:
    """One block on one machine. memory: bytes taken of gpu, cpu and disk."""

    images: int
    sequences: int
    sub_batches: int
    weights: Share
    cache: Share
    cpu_attention: bool
    costs: Costs
    seconds: float
    memory: dict[str, int]

    @property
    def sub_batch(self) -> int:
        return -(-self.sequences // self.sub_batches)


class Infeasible(ValueError):  # noqa: N818 - an answer, not an error of the program
    """No placement of the block fits the limits."""


def predict(
    geometry: ModelGeometry, cache: CacheCost, hardware: Hardware, images: int, weights: Share,
    kv: Share,
) -> Step:  # fmt: skip
    """What a step takes in a placement that is given. KV fills memory before disk, as it does in
    the engine; `kv` is what really lies where."""
    whole = Limits(1 << 60, 1 << 60 if hardware.gpu else 0, 1 << 60)
    program = _Program(geometry, cache, hardware, whole, images, False)
    return program.result(_fractions(weights), _fractions(kv))


def solve(
    geometry: ModelGeometry, cache: CacheCost, hardware: Hardware, limits: Limits, images: int,
    cpu_attention: bool = False,
) -> Step:  # fmt: skip
    """The placement of a block of `images` images with the shortest step. Raises Infeasible."""
    program = _Program(geometry, cache, hardware, limits, images, cpu_attention)
    return program.step()


class _Program:
    """The linear program of one block. Fractions w and c of weights and KV on each tier."""

    def __init__(
        self, geometry: ModelGeometry, cache: CacheCost, hardware: Hardware, limits: Limits,
        images: int, cpu_attention: bool,
    ) -> None:  # fmt: skip
        self.geometry, self.cache, self.hardware, self.limits = geometry, cache, hardware, limits
        self.images, self.cpu_attention = images, cpu_attention
        self.sequences = images * geometry.sequences
        self.sub_batches = -(-self.sequences // STAGED_SEQUENCES)
        self.problem = pulp.LpProblem("placement", pulp.LpMinimize)
        tiers = ("gpu", "cpu", "disk")
        variable = self.problem.add_variable
        self.w = {t: variable(f"w_{t}", 0, self._bound(t)) for t in tiers}
        self.c = {t: variable(f"c_{t}", 0, self._bound(t)) for t in tiers}
        self.layer = variable("layer_seconds", 0)

    def _bound(self, tier: str) -> float:
        there = {
            "gpu": self.hardware.gpu is not None,
            "cpu": True,
            "disk": self.hardware.disk is not None and self.limits.disk > 0,
        }
        return 1.0 if there[tier] else 0.0

    def step(self) -> Step:
        costs = self._costs(self.w, self.c)
        # A little weight on what is moved: of equal placements, the one that moves least.
        moved = self.w["cpu"] + self.c["cpu"] + 2 * self.w["disk"] + 2 * self.c["disk"]
        scale = 1e-6 * self._compute_alone()
        self.problem += 1e6 * (self.layer + scale * moved)
        for seconds in costs.values():
            self.problem += self.layer >= seconds
        self.problem += pulp.lpSum(self.w.values()) == 1
        self.problem += pulp.lpSum(self.c.values()) == 1
        for tier, used in self._memory(self.w, self.c).items():
            self.problem += used * 1e-9 <= SPARE * getattr(self.limits, _LIMIT[tier]) * 1e-9
        _solve(self.problem)
        if pulp.LpStatus[self.problem.status] != "Optimal":
            raise Infeasible(self._lack())
        found = [{t: v.value() or 0.0 for t, v in part.items()} for part in (self.w, self.c)]
        return self.result(*({t: min(1.0, max(0.0, v)) for t, v in p.items()} for p in found))

    def result(self, w: Mapping[str, float], c: Mapping[str, float]) -> Step:
        """The step with so much of weights and KV on each tier."""
        costs = Costs(**{k: float(pulp.value(v)) for k, v in self._costs(w, c).items()})
        memory = {t: int(pulp.value(v)) for t, v in self._memory(w, c).items()}
        seconds = self.geometry.layers * costs.layer + self._rest()
        return Step(
            self.images, self.sequences, self.sub_batches, _share(w), _share(c),
            self.cpu_attention, costs, seconds, memory,
        )  # fmt: skip

    # Seconds of a layer

    def _costs(self, w: Fractions, c: Fractions) -> dict[str, Any]:
        g, b, layers = self.geometry, self.sequences, self.geometry.layers
        read, kept = self.cache.read / layers, self.cache.streamed / layers
        written = self.cache.written / layers
        result = {"compute": self._compute(w, c)}
        if (gpu := self.hardware.gpu) is not None:
            away = c["disk"] if self.cpu_attention else c["cpu"] + c["disk"]
            link = (w["cpu"] + w["disk"]) * g.layer_bytes + away * b * read
            result["link_to_gpu"] = link / gpu.to_gpu.reached
            back = (c["cpu"] + c["disk"]) * b * written
            result["link_from_gpu"] = back / gpu.from_gpu.reached
            host = c["cpu"] * b * read + w["cpu"] * g.layer_bytes
            result["host"] = host / self.hardware.host_memory.reached
        if self.hardware.disk is not None:
            rate = self._disk_rate()
            seconds = (w["disk"] * g.layer_bytes + c["disk"] * b * kept) / rate
            result["disk_read"] = seconds
            result["disk_write"] = c["disk"] * b * written / self.hardware.disk.write.reached
        return result

    def _compute(self, w: Fractions, c: Fractions) -> Any:
        """Arithmetic and the memory it reads. A thread that copies may take a core from it."""
        g, b, read = self.geometry, self.sequences, self.cache.read / self.geometry.layers
        if (gpu := self.hardware.gpu) is not None:
            there = c["gpu"] if self.cpu_attention else c["gpu"] + c["cpu"] + c["disk"]
            return self._compute_alone() + there * b * read / gpu.memory.reached
        cpu = self.hardware.cpu
        if cpu is None or self.hardware.disk is None:
            return self._compute_alone() + b * read / self.hardware.host_memory.reached
        attention = b * read / cpu.attention.reached
        staged = c["disk"] * (self.sub_batches * cpu.stage_seconds + b * self._call_seconds())
        copied = w["disk"] * g.layer_bytes + c["disk"] * b * self.cache.streamed / g.layers
        lost = copied / self._disk_rate() * cpu.copy_share + w["disk"] * cpu.load_seconds
        return self._compute_alone() + attention + staged + lost

    def _compute_alone(self) -> float:
        """Linear layers of one layer."""
        g, cpu = self.geometry, self.hardware.cpu
        overhead = 0.0 if cpu is None else cpu.layer_seconds * self.sub_batches
        return self._linear(g.layer_numbers, g.layer_bytes, overhead)

    def _rest(self) -> float:
        """Seconds of a step besides its layers: logits and sampling."""
        g, cpu = self.geometry, self.hardware.cpu
        overhead = 0.0 if cpu is None else self.images * cpu.image_seconds
        return self._linear(g.head_numbers, g.head_bytes, overhead)

    def _linear(self, numbers: float, bytes: float, overhead: float) -> float:
        """Seconds to multiply a row of every sequence with `numbers` weights of `bytes` in all.
        overhead: of the CPU besides, where it is known."""
        work = 2 * numbers * self.sequences
        if (gpu := self.hardware.gpu) is not None:
            return max(work / gpu.flops.reached, bytes / gpu.memory.reached)
        memory = bytes / self.hardware.host_memory.reached
        if (cpu := self.hardware.cpu) is None:
            return memory
        flops = cpu.linear_flops(bytes / numbers, self.sequences)
        return max(work / flops, memory) + overhead

    def _call_seconds(self) -> float:
        cpu = self.hardware.cpu
        return 0.0 if cpu is None else self.cache.calls * cpu.call_seconds

    def _disk_rate(self) -> float:
        """Of the page cache where all that could be on disk takes less than half of the memory."""
        disk = self.hardware.disk
        assert disk is not None
        most = self.geometry.weight_bytes + self.sequences * self.cache.kept
        in_cache = disk.cached is not None and most < self.hardware.host_memory_bytes / 2
        return (disk.cached if in_cache and disk.cached else disk.read).reached

    # Bytes

    def _memory(self, w: Fractions, c: Fractions) -> dict[str, Any]:
        g, b = self.geometry, self.sequences
        layers, kept = g.layers * g.layer_bytes, b * self.cache.kept
        staging = 2 * min(b, STAGED_SEQUENCES) * self.cache.staged_layer
        tables = g.other_bytes + g.head_bytes
        hidden = 16 * b * g.dim * 4
        buffers = buffer_count(g.layers) * g.layer_bytes
        used = {t: w[t] * layers + c[t] * kept for t in ("gpu", "cpu", "disk")}
        if self.hardware.gpu is not None:
            away = 1 - w["gpu"]
            used["gpu"] += tables + hidden + away * buffers + (1 - c["gpu"]) * staging
            used["cpu"] += (w["disk"] * buffers) + c["disk"] * staging
            return used
        used["cpu"] += tables + hidden + w["disk"] * buffers + c["disk"] * staging
        del used["gpu"]
        return used

    def _lack(self) -> str:
        kept = self.sequences * self.cache.kept
        return (
            f"{self.images} image(s) need {self.geometry.weight_bytes / 1e9:.3g} GB of weights and "
            f"{kept / 1e9:.3g} GB of KV, which no placement fits into "
            + ", ".join(
                f"{getattr(self.limits, limit) / 1e9:.3g} GB of {tier}"
                for tier, limit in _LIMIT.items()
                if getattr(self.limits, limit)
            )
        )


def _solve(problem: pulp.LpProblem) -> None:
    """With the CBC that PuLP 3 brings along, which it says PuLP 4 will not: hence its range."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        problem.solve(pulp.PULP_CBC_CMD(msg=False))


_LIMIT = {"gpu": "gpu", "cpu": "host", "disk": "disk"}


def _fractions(share: Share) -> dict[str, float]:
    return {"gpu": share.gpu / 100, "cpu": share.cpu / 100, "disk": share.disk / 100}


def _share(fractions: Mapping[str, float]) -> Share:
    gpu, disk = round(100 * fractions["gpu"], 4), round(100 * fractions["disk"], 4)
    return Share(gpu, round(100 - gpu - disk, 4), disk)


def _mean(values: Sequence[float]) -> float:
    return fsum(values) / len(values)
