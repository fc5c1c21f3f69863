"""The service on this machine's CPU: under the load of many clients, and under kill -9.

    python -m benchmarks.service_cpu [--output benchmarks/results/service-cpu.json]

Runs tests/soak/load.py and tests/soak/kills.py in their long versions, or joins what they have
written before (`--load FILE`, `--kills FILE`), into one results file.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import results_writer
from tests.soak import kills, load

NAME = "service-cpu.json"


def loaded(args: argparse.Namespace) -> dict[str, Any]:
    words = [f"--model={args.model}", f"--clients={args.clients}", f"--seconds={args.seconds}"]
    flags = [f"--server-flag={flag}" for flag in args.server_flag]
    found = asdict(load.run(words + flags)) if args.load is None else _read(args.load)
    return {"case": "load", "memory_drift": drift(found["memory_timeline"]), **found}


def drift(timeline: list[int]) -> int:
    """Bytes by which memory grew over the last half: the cache has been touched by then."""
    return timeline[-1] - timeline[len(timeline) // 2]


def killed(args: argparse.Namespace) -> list[dict[str, Any]]:
    words = [f"--model={args.kill_model}", f"--lines={args.lines}", f"--kills={args.kill_count}"]
    found = [_read(path) for path in args.kills] or [asdict(kills.run(words))]
    return [{"case": "kills", **each} for each in found]


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="mini", help="under load")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--kill-model", default="mini", help="under kills")
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--kill-count", type=int, default=20)
    parser.add_argument("--load", type=Path, help="an outcome of tests.soak.load")
    parser.add_argument(
        "--kills", type=Path, action="append", default=[], help="an outcome of tests.soak.kills"
    )
    parser.add_argument("--server-flag", action="append", default=[], help="under load")
    parser.add_argument("--output", type=Path, default=results_writer.RESULTS / NAME)
    args = parser.parse_args()
    under_load, under_kills = loaded(args), killed(args)
    measured = {
        "p99 of /health under load": under_load["health_p99_ms"],
        "lost or mixed-up answers": under_load["lost"] + under_load["mixed_up"],
    }
    if any(row["kills"] >= 20 for row in under_kills):
        lost = sum(row["lost"] + row["doubled"] for row in under_kills)
        measured["batch lines lost or duplicated over 20 kills"] = lost
    rows = [under_load, *under_kills]
    result = results_writer.results(NAME, rows, measured)
    results_writer.write(args.output, result)
    results_writer.print_verdicts(result)


if __name__ == "__main__":
    main()
