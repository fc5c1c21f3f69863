"""How fast the bundled model draws on this machine's CPU.

    python -m benchmarks.mini_cpu [--output benchmarks/results/mini-cpu.json]

Loading, one image with guidance, eight images together, dense and with the policy `diagonal`;
each measured `--rounds` times in turn, medians reported.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import results_writer
from engine.config import EngineConfig
from engine.engine import Engine
from engine.events import Event, Finished
from engine.models.presets import load_model
from scheduler.request import ImageRequest, PolicyChoice

NAME = "mini-cpu.json"
PROMPT = "a red apple left of a cat on a blue background"
CASES = [(1, "dense", 0.0), (8, "dense", 0.0), (1, "diagonal", 0.9), (8, "diagonal", 0.9)]


def seconds_to_load(config: EngineConfig) -> float:
    start = time.perf_counter()
    load_model(config.model, config.load_options)
    return time.perf_counter() - start


def draw(engine: Engine, images: int, policy: PolicyChoice, seed: int) -> tuple[float, Finished]:
    """Seconds for `images` images of one request drawn together, and the last one finished."""
    events: list[Event] = []
    request = ImageRequest(PROMPT, seed, engine.model.sampling, n=images, policy=policy)
    start = time.perf_counter()
    engine.add(request, events.append)
    while engine.step():
        pass
    seconds = time.perf_counter() - start
    done = [event for event in events if isinstance(event, Finished)]
    if len(done) != images:
        raise RuntimeError(f"{images - len(done)} of {images} images failed: {events[-1]}")
    return seconds, done[-1]


def measure(rounds: int) -> list[dict[str, Any]]:
    """One row per case; the cases take turns, so that a slow moment hits all of them."""
    config = EngineConfig()
    loads = [seconds_to_load(config) for _ in range(rounds)]
    engine = Engine(config)
    times: dict[tuple[int, str, float], list[float]] = {case: [] for case in CASES}
    last: dict[tuple[int, str, float], Finished] = {}
    draw(engine, 1, PolicyChoice(), 0)
    for turn in range(rounds):
        for case in CASES:
            images, name, sparsity = case
            seconds, last[case] = draw(engine, images, PolicyChoice(name, sparsity), turn)
            times[case].append(seconds)
            print(f"round {turn}: {images} x {name} {sparsity:g}: {seconds:.2f} s", flush=True)
    rows: list[dict[str, Any]] = [{"case": "load", "seconds": statistics.median(loads)}]
    return rows + [_row(case, times[case], last[case]) for case in CASES]


def _row(case: tuple[int, str, float], times: list[float], done: Finished) -> dict[str, Any]:
    images, policy, sparsity = case
    seconds = statistics.median(times)
    return {
        "case": f"{images} x {policy}" + (f" {sparsity:g}" if sparsity else ""),
        "images": images,
        "policy": policy,
        "sparsity": sparsity,
        "seconds": seconds,
        "all_seconds": times,
        "images_per_second": images / seconds,
        "tokens_per_second": images * done.stats.tokens / seconds,
        "kv_read_bytes": done.stats.kv_read_bytes,
        "kv_resident_bytes": done.stats.kv_resident_bytes,
        "density": done.stats.density,
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=results_writer.RESULTS / NAME)
    args = parser.parse_args()
    rows = measure(args.rounds)
    by_case = {row["case"]: row["seconds"] for row in rows}
    measured = {
        "mini loads": by_case["load"],
        "one image with guidance": by_case["1 x dense"],
        "eight images together over one": by_case["8 x dense"] / by_case["1 x dense"],
    }
    result = results_writer.results(NAME, rows, measured)
    results_writer.write(args.output, result)
    for target in result["targets"]:
        verdict = "met" if results_writer.met(target) else "missed"
        print(f"{target['name']}: {target['measured']:.2f} {target['unit']}", end=" ")
        print(f"(target {target['target']}, {verdict})")


if __name__ == "__main__":
    main()
