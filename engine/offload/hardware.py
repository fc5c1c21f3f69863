"""What a machine can do, as the planner sees it: presets in configs/hardware/, or measured."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from engine.models.presets import ROOT

FOLDER = ROOT / "configs" / "hardware"


class HardwareError(ValueError):
    """A machine that is unknown or badly described; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Something a second: bytes or operations. rate: of the source. share: what programs reach."""

    rate: float
    share: float = 1.0
    source: str = ""

    def __post_init__(self) -> None:
        if self.rate <= 0 or not 0 < self.share <= 1:
            raise HardwareError(f"a rate must be positive and its share in (0, 1], got {self}")

    @property
    def reached(self) -> float:
        return self.rate * self.share


@dataclass(frozen=True, slots=True)
class Gpu:
    """memory, to_gpu, from_gpu: bytes/s. flops: operations/s of matrix products."""

    memory_bytes: int
    memory: Rate
    flops: Rate
    to_gpu: Rate
    from_gpu: Rate


@dataclass(frozen=True, slots=True)
class Cpu:
    """How fast the CPU engine's own operators are.

    copy_share: of the time a thread copies, so much is lost to the arithmetic; 0 where there is a
        core to spare.
    linear: operations/s of linear layers by (bytes of a weight, rows), rows ascending.
    attention: bytes/s of KV read by decode attention. layer_seconds: what a layer costs that has
    nothing to do. image_seconds: what an image costs besides the layers, sampling above all.
    stage_seconds: what staging the KV of a sub-batch costs a layer besides its bytes, and
    call_seconds each read or write of it. load_seconds: the same of a layer's weights on disk.
    """

    copy_share: float
    linear: tuple[tuple[int, int, float], ...]
    attention: Rate
    layer_seconds: float
    image_seconds: float
    call_seconds: float
    stage_seconds: float
    load_seconds: float

    def linear_flops(self, weight_bytes: float, rows: int) -> float:
        """Operations/s at so many rows, between the rows that were measured."""
        size = 1 if weight_bytes < 2 else 4
        known = [(r, rate) for bytes, r, rate in self.linear if bytes == size]
        for (low, slow), (high, fast) in pairwise(known):
            if rows <= high:
                part = max(0.0, (rows - low) / (high - low))
                return slow + part * (fast - slow)
        return known[-1][1]


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes/s. cached: reads of what the system's page cache still holds."""

    read: Rate
    write: Rate
    cached: Rate | None = None


@dataclass(frozen=True, slots=True)
class Hardware:
    """One machine. gpu is None where the CPU computes; cpu is None where nobody measured it."""

    name: str
    description: str
    host_memory_bytes: int
    host_memory: Rate
    gpu: Gpu | None = None
    cpu: Cpu | None = None
    disk: Disk | None = None


def presets() -> dict[str, Hardware]:
    """All presets by name."""
    return {found.name: found for found in map(_read, sorted(FOLDER.glob("*.yaml")))}


def preset(name: str) -> Hardware:
    """Raises HardwareError naming the known ones."""
    known = presets()
    if name not in known:
        match = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {match[0]!r}?" if match else ""
        raise HardwareError(
            f"unknown hardware {name!r}{hint} (known: {', '.join(known)}; leave it out to measure "
            "this machine)"
        )
    return known[name]


@dataclass(frozen=True, slots=True)
class _Preset:
    name: str
    host: Mapping[str, Any]
    gpu: Mapping[str, Any]
    description: str = ""
    disk: Mapping[str, Any] | None = None


def _read(path: Path) -> Hardware:
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise HardwareError(f"{path.name} holds no mapping")
    _check(values, [f.name for f in fields(_Preset)], path.name)
    raw = _Preset(**values)
    where = f"{path.name}: "
    _check(raw.gpu, ["memory_gb", "memory", "tflops", "to_gpu", "from_gpu"], where + "gpu")
    _check(raw.host, ["memory_gb", "memory"], where + "host")
    gpu = Gpu(
        int(raw.gpu["memory_gb"] * 1e9),
        *(_rate(raw.gpu[key], where + key) for key in ("memory", "tflops", "to_gpu", "from_gpu")),
    )
    disk = None
    if raw.disk is not None:
        _check(raw.disk, ["read", "write"], where + "disk")
        disk = Disk(*(_rate(raw.disk[key], where + key) for key in ("read", "write")))
    memory = _rate(raw.host["memory"], where + "memory")
    host = int(raw.host["memory_gb"] * 1e9)
    return Hardware(raw.name, raw.description, host, memory, gpu, None, disk)


def _rate(values: Mapping[str, Any], where: str) -> Rate:
    unit, scale = ("gb_s", 1e9) if "gb_s" in values else ("rate", 1e12)
    _check(values, [unit, "share", "source"], where)
    return Rate(values[unit] * scale, values.get("share", 1.0), values.get("source", ""))


def _check(values: Mapping[str, Any], known: list[str], where: str) -> None:
    for key in values:
        if key not in known:
            match = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean {match[0]!r}?" if match else ""
            raise HardwareError(f"{where}: unknown key {key!r}{hint}")
