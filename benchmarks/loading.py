"""How fast a model loads: real shards in a geometry's full size, random weights, a real disk.

    python -m benchmarks.loading --model janus-pro-1b --dtype bf16 --draw -o loading-cpu.json

Writes the checkpoint of a preset in its published names and shards (bf16, as most are), reads the
files once without parsing them for a ceiling, loads them, and draws one image on request. The page
cache is told to forget the files before each reading, so that the disk is measured.
"""

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.results_writer import results, write
from engine.checkpoint import Checkpoint, Param
from engine.config import EngineConfig
from engine.engine import Engine
from engine.events import Event, Failed, Finished
from engine.models.family import DecoderModel, FamilyConfig
from engine.models.options import DTYPES
from engine.models.presets import presets
from engine.models.registry import PUBLISHED
from scheduler.request import ImageRequest, PolicyChoice

GIB = 2**30


def write_shards(params: list[Param], folder: Path, shard_bytes: int) -> list[Path]:
    """Random bf16 tensors under the names a checkpoint has, in files of at most `shard_bytes`."""
    generator = torch.Generator().manual_seed(0)
    files, pending, size = list[Path](), dict[str, Tensor](), 0

    def flush() -> None:
        file = folder / f"model-{len(files) + 1:05d}.safetensors"
        save_file(pending, file)
        files.append(file)

    for name, shape in sorted({s.name: s.shape for p in params for s in p.sources}.items()):
        tensor = torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
        if pending and size + tensor.nbytes > shard_bytes:
            flush()
            pending, size = {}, 0
        pending[name] = tensor
        size += tensor.nbytes
    flush()
    return files


def forget(files: list[Path]) -> None:
    """Write the files out and drop their pages from memory, so that reading them reads the disk."""
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_all(files: list[Path]) -> None:
    buffer = bytearray(16 << 20)
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


def watched(run: Callable[[], Any]) -> tuple[Any, float, int]:
    """What `run` returns, its seconds, and by how many bytes the process grew at most."""
    peak, done, before = 0, threading.Event(), _resident()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, _resident())

    thread = threading.Thread(target=watch)
    thread.start()
    started = time.perf_counter()
    result = run()
    seconds = time.perf_counter() - started
    done.set()
    thread.join()
    return result, seconds, peak - before


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure(name: str, settings: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One row of the results."""
    preset = presets()[name]
    family = PUBLISHED[preset.family]
    config = family.configure(preset.config, None)
    params = family.parameters(config)
    files = write_shards(params, folder, int(settings.shard_gib * GIB))
    sizes = [file.stat().st_size for file in files]
    forget(files)
    _, reading, _ = watched(lambda: read_all(files))
    forget(files)
    tensors, loading, grown = watched(lambda: load(files, params, settings))
    stays = sum(t.nbytes for t in tensors.values())
    row = {
        "model": name,
        "dtype": settings.dtype,
        "file_bytes": sum(sizes),
        "shards": len(files),
        "read_seconds": reading,
        "load_seconds": loading,
        "read_gib_per_second": sum(sizes) / reading / GIB,
        "load_gib_per_second": sum(sizes) / loading / GIB,
        "share_of_reading": reading / loading,
        "stays_bytes": stays,
        "beyond_what_stays_in_largest_shards": (grown - stays) / max(sizes),
    }
    return row | (draw(name, family, config, tensors, settings) if settings.draw else {})


def load(files: list[Path], params: list[Param], settings: argparse.Namespace) -> dict[str, Tensor]:
    checkpoint = Checkpoint.of_files(files)
    checkpoint.check(params)
    device = torch.device(settings.device)
    return checkpoint.load(params, DTYPES[settings.dtype], device, progress=True)


def draw(
    name: str,
    family: type[DecoderModel],
    config: FamilyConfig,
    tensors: dict[str, Tensor],
    settings: argparse.Namespace,
) -> dict[str, Any]:
    """One guided image of the loaded weights, for what a step takes."""
    engine_config = EngineConfig(
        model=name, backend=settings.backend, dtype=settings.dtype, load_format="dummy"
    )
    text = family.dummy_text(config)
    special = {key: text.id_of(token) for key, token in family.special_tokens.items()}
    model = family(name, config, tensors, text, special, engine_config.load_options)
    engine, events = Engine(engine_config, model), list[Event]()
    prompt = "7" if name == "llamagen-xl" else " ".join(f"word{i}" for i in range(40))
    policy = PolicyChoice(settings.policy, settings.sparsity)
    engine.add(ImageRequest(prompt, 1, model.sampling, policy=policy), events.append)
    steps = _steps(engine, settings.steps)
    failed = [e.reason for e in events if isinstance(e, Failed)]
    if failed:
        raise RuntimeError(failed[0])
    return {
        "steps": len(steps),
        "seconds_per_step": sorted(steps)[len(steps) // 2],
        "finished": any(isinstance(e, Finished) for e in events),
    }


def _steps(engine: Engine, most: int | None) -> list[float]:
    """Seconds of each decode step (the first step reads the prompt and is left out)."""
    return list(_timed(engine, most))[1:]


def _timed(engine: Engine, most: int | None) -> Iterator[float]:
    count = 0
    while most is None or count <= most:
        started = time.perf_counter()
        if not engine.step():
            return
        yield time.perf_counter() - started
        count += 1


def main() -> None:
    known = [name for name, preset in presets().items() if preset.family in PUBLISHED]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=known, default=["llamagen-xl"])
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", choices=["native", "reference"], default="reference")
    parser.add_argument("--shard-gib", type=float, default=2.0)
    parser.add_argument("--folder", type=Path, help="where the files are written for a while")
    parser.add_argument("--draw", action="store_true", help="draw one image of each")
    parser.add_argument("--steps", type=int, help="of that image; default: all")
    parser.add_argument("--policy", default="dense")
    parser.add_argument("--sparsity", type=float, default=0.0)
    parser.add_argument("-o", "--output", type=Path, help="results file (JSON)")
    args = parser.parse_args()
    rows = []
    for name in args.model:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            rows.append(measure(name, args, Path(folder)))
        print(rows[-1], flush=True)
    if args.output:
        write(args.output, results(args.output.name, rows, {}))


if __name__ == "__main__":
    main()
