"""What this machine can do, measured once (some seconds) and kept in the user's cache folder."""

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from engine.cache import host_memory
from engine.layers import Linear
from engine.offload.config import OffloadConfig
from engine.offload.disk import ScratchFile
from engine.offload.hardware import Cpu, Disk, Gpu, Hardware, Rate
from engine.offload.placement import Placement, Share
from sparse_attn import ops
from sparse_attn.attention import Backend
from sparse_attn.cache import LayerCache, LayerTable
from sparse_attn.format import FORMATS
from sparse_attn.geometry import Grid
from sparse_attn.layout import CacheLayout
from sparse_attn.policies import build
from sparse_attn.policy import Batch, Heads

VERSION = 3
ROWS = (2, 4, 8, 16, 32)
DISK_BYTES = 256 << 20
READ_BYTES = 256 << 20
MEASURED = "measured on this machine"
TINY_CALLS = 4
"""Reads and writes of a layer of a sequence of the model that `_tiny_step` draws with."""


def this_machine(folder: Path | None = None, again: bool = False) -> Hardware:
    """From the cache, or measured now. folder: whose disk counts; None leaves the disk out.

    Raises OffloadError if the folder cannot be written."""
    path = _cache_path(folder)
    if not again and path.is_file():
        try:
            return _loaded(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError):
            pass  # written by another version, or damaged: measure again
    found = measure(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(found), indent=1), encoding="utf-8")
    return found


def measure(folder: Path | None) -> Hardware:
    """Host memory, the CPU engine's operators, the disk of `folder`, and a GPU if there is one."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    data = torch.ones(READ_BYTES // 4)
    read = Rate(READ_BYTES / best(data.sum), 1.0, MEASURED)
    del data
    disk = None if folder is None else measure_disk(folder)
    name = "this machine"
    text = f"{torch.get_num_threads()} threads of this machine, torch {torch.__version__}"
    gpu = measure_gpu() if torch.cuda.is_available() else None
    return Hardware(name, text, memory, read, gpu, measure_cpu(), disk)


def measure_cpu() -> Cpu:
    backend: Backend = "native" if ops.available() else "reference"
    linear = [(size, rows, _linear(size, rows, backend)) for size in (1, 4) for rows in ROWS]
    with TemporaryDirectory(prefix="bishop-") as folder:
        step = partial(_tiny_step, Path(folder))
        shallow, deep, wide, both = (step(ls, n) for ls, n in ((2, 1), (12, 1), (2, 8), (12, 8)))
        staged, many_staged, loaded = step(12, 1, kv=100), step(12, 8, kv=100), step(12, 1, 100)
    threads = torch.get_num_threads()
    share = 1 / threads if threads >= (os.cpu_count() or 1) else 0.0
    few, many = (staged - deep) / 12, (many_staged - both) / 12
    call = _positive((many - few) / 14 / TINY_CALLS)
    return Cpu(
        share, tuple(linear), Rate(_attention(), 1.0, MEASURED), _positive((deep - shallow) / 10),
        _positive((wide - shallow) / 7), call, _positive(few - 2 * TINY_CALLS * call),
        _positive((loaded - deep) / 12),
    )  # fmt: skip


def _positive(seconds: float) -> float:
    return max(1e-7, seconds)


def measure_disk(folder: Path) -> Disk:
    """Reads past the page cache and out of it, and writes until they are on the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    file = ScratchFile(folder, DISK_BYTES)
    data = host_memory(DISK_BYTES)
    data.random_(0, 255)
    start = time.perf_counter()
    file.write([0], data[None])
    file.flush()
    write = DISK_BYTES / (time.perf_counter() - start)
    cached = DISK_BYTES / best(lambda: file.read([(0, 0, DISK_BYTES)], data), 3)
    file.forget()
    start = time.perf_counter()
    file.read([(0, 0, DISK_BYTES)], data)
    read = DISK_BYTES / (time.perf_counter() - start)
    file.close()
    rates = (Rate(rate, 1.0, MEASURED) for rate in (read, write, cached))
    return Disk(*rates)


def measure_gpu() -> Gpu:
    """The first GPU. Written for GPUs, but not run on one yet."""
    gpu, size = torch.device("cuda"), READ_BYTES
    here = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there, other = (torch.empty(size, dtype=torch.uint8, device=gpu) for _ in range(2))
    a = torch.rand(4096, 4096, device=gpu, dtype=torch.bfloat16)

    def rate(amount: float, run: Callable[[], object]) -> Rate:
        def waited() -> None:
            run()
            torch.cuda.synchronize()

        return Rate(amount / best(waited), 1.0, MEASURED)

    return Gpu(
        torch.cuda.get_device_properties(gpu).total_memory,
        rate(2 * size, lambda: other.copy_(there)), rate(2 * 4096**3, lambda: a @ a),
        rate(size, lambda: there.copy_(here, non_blocking=True)),
        rate(size, lambda: here.copy_(there, non_blocking=True)),
    )  # fmt: skip


def best(run: Callable[[], object], times: int = 5) -> float:
    """Seconds of the quickest of a few runs, after one that warms up: nothing runs too fast."""
    run()
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _linear(size: int, rows: int, backend: Backend) -> float:
    """Operations/s of a layer [1024, 768] with weights of `size` bytes."""
    weight = torch.rand(1024, 768) - 0.5
    codes, scale = (weight * 200).to(torch.int8), torch.full((1024,), 0.005)
    layer = Linear(codes, scale, backend) if size == 1 else Linear(weight, None, backend)
    x = torch.rand(rows, 768)
    return 2 * rows * weight.numel() / best(lambda: layer(x), 30)


def _attention() -> float:
    """Bytes/s of bf16 KV that decode attention reads: 16 sequences of 576 keys in 6 heads of 64."""
    if not ops.available():
        return 1e9
    heads, count, cpu = Heads(1, 6), 16, torch.device("cpu")
    policy = build("dense", Grid(24, 24), heads, 0.0, {}, "mini")
    layout = CacheLayout.of(policy, 32, 64, FORMATS["bf16"])
    entries = FORMATS["bf16"].empty(count * layout.entries, 64, cpu).normal_()
    cache = LayerCache(entries, LayerTable.of(layout, 0, cpu))
    position = 500
    batch = Batch(
        torch.arange(count) * layout.entries, torch.full((count,), position, dtype=torch.int32),
        torch.full((count,), 32, dtype=torch.int32), torch.zeros(count, dtype=torch.int64),
    )  # fmt: skip
    q, plan = torch.rand(count, 6, 64), policy.plan(0, None, cpu)
    seconds = best(lambda: ops.decode(q, cache, plan, batch, 0.125), 20)
    return count * 6 * (position + 1 + 32) * 256 / seconds


def _tiny_step(folder: Path, layers: int, images: int, weights: int = 0, kv: int = 0) -> float:
    """Seconds of a decode step of a model that has next to nothing to compute, with so many percent
    of its weights and KV on disk."""
    from engine.config import EngineConfig
    from engine.engine import Engine
    from engine.models.mini import Mini, MiniConfig
    from scheduler.request import ImageRequest, Sampling

    shape = MiniConfig(
        grid=(8, 8), dim=32, layers=layers, heads=2, head_dim=16, ffn=64, image_vocab=4096,
        text_vocab=64,
    )  # fmt: skip
    backend = "native" if ops.available() else "reference"
    model = Mini.dummy("measure", shape, backend)  # type: ignore[arg-type]
    placement = Placement(Share(0, 100 - weights, weights), Share(0, 100 - kv, kv))
    offload = OffloadConfig(placement, folder)
    config = EngineConfig(
        model="measure",
        backend=backend,  # type: ignore[arg-type]
        cache_bytes=32 << 20,
        offload=offload,
    )
    engine = Engine(config, model)
    engine.add(ImageRequest("nothing", 0, Sampling(3.0, top_p=0.9), n=images), lambda event: None)
    for _ in range(4):
        engine.step()
    seconds = []
    for _ in range(40):
        start = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start)
    engine.close()
    return sorted(seconds)[len(seconds) // 4]


def _cache_path(folder: Path | None) -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    what = [
        VERSION, platform.node(), platform.processor(), os.cpu_count(), torch.__version__,
        torch.get_num_threads(), None if folder is None else str(folder.resolve()),
        ops.available(),
    ]  # fmt: skip
    name = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
    return base / "bishop" / f"hardware-{name}.json"


def _loaded(raw: dict[str, Any]) -> Hardware:
    """The inverse of `asdict`. Raises ValueError, KeyError or TypeError."""

    def rates(values: dict[str, Any]) -> dict[str, Any]:
        return {k: Rate(**v) if isinstance(v, dict) else v for k, v in values.items()}

    gpu, cpu, disk = (raw[name] for name in ("gpu", "cpu", "disk"))
    values = rates({k: v for k, v in raw.items() if k not in ("gpu", "cpu", "disk")})
    values["cpu"] = None
    values["gpu"] = None if gpu is None else Gpu(**rates(gpu))
    values["disk"] = None if disk is None else Disk(**rates(disk))
    if cpu is not None:
        linear = tuple((int(size), int(rows), float(rate)) for size, rows, rate in cpu["linear"])
        values["cpu"] = Cpu(**(rates(cpu) | {"linear": linear}))
    return Hardware(**values)
