"""Offloading on this machine's CPU and disk: what the planner predicts against what a step takes.

    python -m benchmarks.offload_cpu --rounds 2     # about seven minutes on two cores

`mini`, with weights and KV in memory and on disk in turn. The machine is measured first, as
`bishop plan` does; then every case draws whole pictures, and the mean of its decode steps counts.
Bytes are counted by the engine and must be those predicted. Copies by flexgen's own way (a fresh
mapping a copy) and by plain reads are compared too.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from benchmarks import results_writer
from benchmarks.timing import best_seconds
from engine.config import EngineConfig
from engine.engine import Engine
from engine.events import Event, Failed
from engine.models.presets import load_model
from engine.offload import flexgen_adapter
from engine.offload.config import OffloadConfig
from engine.offload.cost import CacheCost, predict
from engine.offload.geometry import geometry_of
from engine.offload.hardware import Hardware
from engine.offload.measure import measure
from engine.offload.placement import Placement, Share
from engine.offload.regions import read_bytes
from scheduler.request import ImageRequest, PolicyChoice

NAME = "offload-cpu.json"
PROMPT = "a red apple left of a cat on a blue background"
COPY_BYTES = 16 << 20


@dataclass(frozen=True)
class Case:
    """weights, kv: percent on disk."""

    images: int
    weights: int
    kv: int
    policy: str = "dense"
    sparsity: float = 0.0

    @property
    def name(self) -> str:
        where = f"weights {self.weights} % and KV {self.kv} % on disk"
        return f"{self.images} x {self.policy}: {where if self.weights or self.kv else 'in memory'}"

    @property
    def choice(self) -> PolicyChoice:
        return PolicyChoice(self.policy, self.sparsity)


CASES = [
    *(Case(images, w, kv) for images in (1, 8) for w, kv in ((0, 0), (100, 0), (0, 50), (0, 100),
                                                             (100, 100))),
    Case(8, 0, 0, "window", 0.9), Case(8, 0, 100, "window", 0.9), Case(8, 100, 100, "window", 0.9),
]  # fmt: skip


class Bench:
    """One case: its engine, its predictions, its times."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.seconds: list[float] = []
        self.read: list[int] = []
        self.written: list[int] = []

    def open(self) -> Engine:
        """An engine whose cache holds exactly the pictures of the case."""
        sequences = self.case.images * 2
        model = load_model("mini", EngineConfig().load_options)
        layout = Engine(EngineConfig(cache_bytes=1 << 28), model).intake.group(self.case.choice)
        self.group, self.sequence_bytes = layout, layout.layout.bytes
        size = sequences * -(-self.sequence_bytes // 256) * 256
        placement = Placement(
            Share(0, 100 - self.case.weights, self.case.weights),
            Share(0, 100 - self.case.kv, self.case.kv),
        )
        away = self.case.weights or self.case.kv
        offload = OffloadConfig(placement, self.folder if away else None)
        self.config = EngineConfig(cache_bytes=size, offload=offload)
        return Engine(self.config, model)

    @property
    def on_disk(self) -> int:
        """Sequences whose KV is on disk."""
        memory = self.config.resolved_cache_bytes - self.config.cache_on_disk
        return self.case.images * 2 - memory // self.sequence_bytes

    def run(self) -> None:
        """Draw the pictures of the case once."""
        engine = self.open()
        events: list[Event] = []
        request = ImageRequest(
            PROMPT, 0, engine.model.sampling, n=self.case.images, policy=self.case.choice
        )
        engine.add(request, events.append)
        engine.step()  # prompts
        tokens, took, before = engine.model.grid.tokens, 0.0, engine.offload.read_bytes
        for _ in range(tokens - 2):  # all but the last, which also makes the pixels
            start = time.perf_counter()
            engine.step()
            took += time.perf_counter() - start
        self.read.append(engine.offload.read_bytes - before)
        self.steps = tokens - 2
        self.seconds.append(took / self.steps)
        self.predicted_read = self._predicted_bytes(engine)
        while engine.step():
            pass
        engine.close()
        if failed := [e for e in events if isinstance(e, Failed)]:
            raise RuntimeError(failed[0].reason)

    def _predicted_bytes(self, engine: Engine) -> int:
        stream, prompt = engine.offload.weights, engine.model.shape.prompt
        weights = 0 if stream is None else stream.disk_bytes * self.steps
        kv = sum(read_bytes(self.group.layout, prompt, t) for t in range(self.steps))
        return weights + self.on_disk * kv

    def row(self, machine: Hardware, alone: float) -> dict[str, Any]:
        g = geometry_of("mini", "fp32")
        cost = CacheCost.of(self.group.policy, g, self.config.format)
        share = 100 * self.on_disk / (2 * self.case.images)
        weights = self.config.offload.placement.weights
        step = predict(g, cost, machine, self.case.images, weights, Share(0, 100 - share, share))
        seconds = min(self.seconds)
        return {
            "kind": "step",
            "case": self.case.name,
            **asdict(self.case),
            "sequences_on_disk": self.on_disk,
            "step_ms": seconds * 1e3,
            "predicted_ms": step.seconds * 1e3,
            "error": step.seconds / seconds - 1,
            "bound": step.costs.bound,
            "read_bytes_per_step": self.read[-1] / self.steps,
            "predicted_bytes_per_step": self.predicted_read / self.steps,
            "bytes_off": max(abs(read - self.predicted_read) for read in self.read),
            "times_memory": seconds / alone,
            "images_per_second": self.case.images / seconds / g.grid.tokens,
            "all_step_ms": [s * 1e3 for s in self.seconds],
            "threads": torch.get_num_threads(),
        }


def measured(rounds: int, folder: Path) -> tuple[list[dict[str, Any]], Hardware]:
    machine = measure(folder)
    benches = [Bench(case, folder) for case in CASES]
    for turn in range(rounds):
        for bench in benches:
            bench.run()
            print(f"round {turn}: {bench.case.name}: {bench.seconds[-1] * 1e3:.2f} ms", flush=True)
    alone = {
        (b.case.images, b.case.policy): min(b.seconds)
        for b in benches if not (b.case.weights or b.case.kv)
    }  # fmt: skip
    rows = [b.row(machine, alone[b.case.images, b.case.policy]) for b in benches]
    return [*rows, *copies(folder), {"kind": "machine", **flat(machine)}], machine


def copies(folder: Path) -> Iterator[dict[str, Any]]:
    """GB/s of copies from a file in the page cache to the host, whole and in pieces of a head."""
    disk, host = flexgen_adapter.Disk(folder), flexgen_adapter.Host()
    file, target = (d.allocate((COPY_BYTES,), np.uint8) for d in (disk, host))
    flexgen_adapter.copy(file, None, host.allocate((COPY_BYTES,), np.uint8), None).wait()
    data = target.data

    def mapped(size: int) -> None:
        for at in range(0, COPY_BYTES, size):
            source = torch.from_numpy(np.lib.format.open_memmap(file.data))
            data[at : at + size].copy_(source[at : at + size])

    def plain(size: int) -> None:
        with Path(file.data).open("rb", buffering=0) as opened:
            opened.seek(128)
            view = memoryview(data.numpy())
            for at in range(0, COPY_BYTES, size):
                opened.readinto(view[at : at + size])

    for size in (COPY_BYTES, 128 << 10):
        ways = {
            "flexgen's mapping": partial(mapped, size),
            "plain reads": partial(plain, size),
        }
        for way, seconds in best_seconds(ways, 0.5).items():
            yield {"kind": "copy", "way": way, "piece_bytes": size,
                   "gb_s": COPY_BYTES / seconds / 1e9}  # fmt: skip
    disk.close_copy_threads()


def flat(machine: Hardware) -> dict[str, Any]:
    cpu, disk = machine.cpu, machine.disk
    assert cpu is not None and disk is not None and disk.cached is not None
    return {
        "host_memory_gb_s": machine.host_memory.rate / 1e9,
        "attention_gb_s": cpu.attention.rate / 1e9,
        "disk_read_gb_s": disk.read.rate / 1e9,
        "disk_write_gb_s": disk.write.rate / 1e9,
        "page_cache_gb_s": disk.cached.rate / 1e9,
        "linear_gflops": {f"{b} byte, {r} rows": f / 1e9 for b, r, f in cpu.linear},
        "layer_us": cpu.layer_seconds * 1e6,
        "image_us": cpu.image_seconds * 1e6,
        "call_us": cpu.call_seconds * 1e6,
        "stage_us": cpu.stage_seconds * 1e6,
        "load_us": cpu.load_seconds * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="whose disk is used; a temporary one if left")
    parser.add_argument("--output", type=Path, default=results_writer.RESULTS / NAME)
    args = parser.parse_args()
    with TemporaryDirectory(prefix="bishop-", dir=args.folder) as folder:
        rows, _ = measured(args.rounds, Path(folder))
    steps = [row for row in rows if row["kind"] == "step"]
    figures = {
        "prediction of a step's time, worst": max(abs(row["error"]) for row in steps),
        "streamed bytes other than predicted": max(row["bytes_off"] for row in steps),
    }
    results_writer.write(args.output, results_writer.results(NAME, rows, figures))
    for row in steps:
        print(f"{row['case']}: {row['step_ms']:.2f} ms, predicted {row['predicted_ms']:.2f}")
    print(figures)


if __name__ == "__main__":
    main()
