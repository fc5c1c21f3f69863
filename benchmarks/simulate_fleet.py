"""A fleet of a thousand GPUs and ten thousand images a second, simulated: see benchmarks/fleet.

    python -m benchmarks.simulate_fleet [--scale 0.1] [--seconds 20]

Sweeps the load, then breaks things far more often than they break, then takes front ends away.
The sweeps run at `--scale` of the fleet with everything that is shared scaled alike; one run has
the full size. Two minutes.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any

from rich.progress import track

from benchmarks import results_writer
from benchmarks.fleet import inputs as given
from benchmarks.fleet import measure
from benchmarks.fleet.inputs import Inputs
from benchmarks.fleet.simulation import Fleet

NAME = "fleet-simulation.json"
PLOT = results_writer.ROOT / "docs" / "images" / "fleet-simulation.png"
LOADS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
STRESS = {"gpu_hours": 0.05, "front_end_hours": 0.05, "restart_seconds": 10.0}
"""Failures by the hour instead of by the year, so that a short run sees many."""

Row = dict[str, Any]


def scaled(inputs: Inputs, scale: float, load: float = 1.0) -> Inputs:
    """A smaller fleet with the same load on each of its parts."""
    return inputs.scaled(
        gpus=round(inputs.gpus * scale),
        front_ends=max(round(inputs.front_ends * scale), 1),
        images_per_second=inputs.images_per_second * scale * load,
        storage_puts=inputs.storage_puts * scale,
        transaction_ms=inputs.transaction_ms / scale,
    )


def simulate(case: str, inputs: Inputs, seconds: float, failures: bool = False) -> Row:
    """One run as a row: utilisation of each part, latencies, what was drawn twice."""
    fleet, start = Fleet(inputs, failures=failures), time.perf_counter()
    warm = 8.0
    outcome = fleet.run(warm, seconds)
    done = outcome.ended_warm / seconds
    used = utilisation(fleet, warm + seconds, done)
    cut = quantiles(outcome.latencies, n=100) if len(outcome.latencies) > 1 else [0.0] * 99
    return {
        "kind": "run",
        "case": case,
        "things_fail": "yes" if failures else "no",
        "gpus": inputs.gpus,
        "front_ends": inputs.front_ends,
        "offered_images_per_second": round(inputs.images_per_second, 1),
        "done_images_per_second": round(done, 1),
        **{f"{part}_utilisation": round(share, 4) for part, share in used.items()},
        "first_to_saturate": max(used, key=lambda part: used[part]),
        "p50_seconds": round(cut[49], 3),
        "p99_seconds": round(cut[98], 3),
        "gpu_failures": outcome.gpu_failures,
        "front_end_failures": outcome.front_end_failures,
        "drawn_again": outcome.redrawn,
        "ended_twice": outcome.ended_twice,
        "took_seconds": round(time.perf_counter() - start, 1),
    }


def utilisation(fleet: Fleet, seconds: float, done: float) -> dict[str, float]:
    """Share of what each part can do that was asked of it; of GPUs, what they did."""
    inputs = fleet.inputs
    front = sum(each.cpu.busy for each in fleet.front_ends) / (seconds * inputs.front_ends)
    return {
        "gpu": done / (inputs.gpus * inputs.gpu_images_per_second),
        "front_end": front,
        "database": fleet.database.utilisation(seconds),
        "storage": fleet.storage.utilisation(seconds),
    }


def measured_inputs() -> tuple[Inputs, list[Row]]:
    """The inputs with what this machine measures, and rows that say where each comes from."""
    front, store = measure.front_end_ms(), measure.transactions()
    both = front["png_ms"] + front["http_ms"]
    figures = {
        "front_end_ms": both,
        "line_ms": both,
        "transaction_ms": store["transaction_ms"],
        "line_transactions": store["line_transactions"],
    }
    rows = [
        {"kind": "input", "name": name, "value": each["value"], "unit": each["unit"],
         "source": each["source"]}
        for name, each in given.entries().items()
    ]  # fmt: skip
    rows += [
        {"kind": "input", "name": name, "value": round(value, 3),
         "unit": "ms" if name.endswith("_ms") else "a line", "source": "measured on this machine"}
        for name, value in (front | store).items()
    ]  # fmt: skip
    return given.load(**figures), rows


def cases(inputs: Inputs, scale: float) -> list[tuple[str, Inputs, bool]]:
    """Name, inputs, and whether things fail."""
    few = inputs.scaled(front_ends=max(inputs.front_ends * 2 // 5, 1))
    return [
        *((f"load x{load:g}", scaled(inputs, scale, load), False) for load in LOADS),
        ("failures", scaled(inputs.scaled(**STRESS), scale), True),
        ("few front ends", scaled(few, scale), False),
        ("claims of 8 lines", scaled(inputs.scaled(lines_per_claim=8), scale, 1.5), False),
        ("full size", inputs, True),
    ]


def plot(rows: Sequence[Row], path: Path) -> None:
    """Utilisation and latency over the load."""
    from matplotlib.figure import Figure

    sweep = [row for row in rows if row["case"].startswith("load")]
    x = [float(row["case"].removeprefix("load x")) for row in sweep]
    figure = Figure(figsize=(8, 3), dpi=80, layout="constrained")
    left, right = figure.subplots(1, 2)
    for part in ("gpu", "front_end", "database", "storage"):
        left.plot(x, [row[f"{part}_utilisation"] for row in sweep], "o-", label=part)
    left.set(xlabel="load, times 10,000 images/s", ylabel="utilisation", ylim=(0, None))
    left.axhline(1, color="gray", lw=0.8)
    left.legend(frameon=False)
    for name in ("p50", "p99"):
        right.plot(x, [row[f"{name}_seconds"] for row in sweep], "o-", label=name)
    right.set(xlabel="load, times 10,000 images/s", ylabel="latency, s", ylim=(0, None))
    right.legend(frameon=False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scale", type=float, default=0.1)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--output", type=Path, default=results_writer.RESULTS / NAME)
    parser.add_argument("--plot", type=Path, default=PLOT)
    args = parser.parse_args()
    inputs, sources = measured_inputs()
    print(f"a GPU draws at most {inputs.gpu_images_per_second:.1f} images/s (calculated)")
    rows = []
    for case, each, failures in track(cases(inputs, args.scale), "simulating"):
        seconds = args.seconds / 4 if case == "full size" else args.seconds
        rows.append(simulate(case, each, seconds, failures))
    for row in rows:
        shares = {k.removesuffix("_utilisation"): v for k, v in row.items() if "_util" in k}
        print(
            f"{row['case']:>15}: {shares}, p50 {row['p50_seconds']} s, p99 {row['p99_seconds']} s"
        )
    plot(rows, args.plot)
    results_writer.write(args.output, results_writer.results(NAME, [*rows, *sources]))


if __name__ == "__main__":
    main()
