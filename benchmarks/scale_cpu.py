"""Two single-threaded replicas against one on this machine's CPU, under load and under kill -9.

    python -m benchmarks.scale_cpu [--output benchmarks/results/scale-cpu.json]

Throughput: servers with `--replicas 1` and `--replicas 2` draw the same requests in turns, so that
the machine is in the same state for both; each has a core for itself. Latency: interactive
requests at random moments while batch lines fill what they leave. Kills: tests/soak/replicas.py,
run here or joined from a file (`--kills FILE`); a cut of the network: tests/soak/network.py, joined
from a file (`--network FILE`).
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from benchmarks import results_writer
from benchmarks.bench_command import PROMPTS
from tests.soak import kills, replicas
from tests.soak.server import ServerProcess

NAME = "scale-cpu.json"
FLAGS = ("--threads=1", "--cache-mib=512")


@contextmanager
def server(model: str, count: int, *flags: str) -> Iterator[httpx.Client]:
    """A client of a server whose replicas all draw."""
    with tempfile.TemporaryDirectory() as folder:
        process = ServerProcess(Path(folder), model, f"--replicas={count}", *FLAGS, *flags)
        process.start()
        try:
            with httpx.Client(base_url=process.url, timeout=600, trust_env=False) as http:
                while http.get("/health").json()["engines"] < count:
                    time.sleep(0.1)
                yield http
        finally:
            process.terminate()


def draw(http: httpx.Client, seed: int) -> float:
    """Seconds until a picture is there."""
    start = time.perf_counter()
    body = {"prompt": PROMPTS[seed % len(PROMPTS)], "seed": seed}
    http.post(kills.ENDPOINT, json=body).raise_for_status()
    return time.perf_counter() - start


def draw_all(http: httpx.Client, images: int) -> float:
    """Seconds for so many pictures, all asked for at once."""
    start = time.perf_counter()
    with ThreadPoolExecutor(images) as pool:
        list(pool.map(lambda seed: draw(http, seed), range(images)))
    return time.perf_counter() - start


def throughput(args: argparse.Namespace) -> tuple[list[dict[str, Any]], float]:
    """Rows, and the images per second of two over those of one. Each replica draws the same number
    at once in both cases, so that the batch is no part of the gain."""
    seconds: dict[int, list[float]] = {1: [], 2: []}
    for turn in range(args.rounds):
        for count in (1, 2) if turn % 2 == 0 else (2, 1):
            with server(args.model, count) as http:
                draw_all(http, count)
                seconds[count].append(draw_all(http, count * args.images))
    rows = [
        {"case": "throughput", "model": args.model, "replicas": count, "threads": 1,
         "images": count * args.images, "seconds": statistics.median(taken), "rounds": taken,
         "images_per_second": count * args.images / statistics.median(taken)}
        for count, taken in seconds.items()
    ]  # fmt: skip
    pairs = zip(seconds[1], seconds[2], strict=True)
    return rows, statistics.median(2 * one / two for one, two in pairs)


def mixed(args: argparse.Namespace) -> dict[str, Any]:
    """Interactive latencies with a batch in the background, of two replicas."""
    dice, taken, lock = random.Random(0), [], threading.Lock()

    def ask(seed: int) -> None:
        seconds = draw(http, 10_000 + seed)
        with lock:
            taken.append(seconds)

    with server(args.model, 2, f"--batch-lines={args.batch_lines}") as http:
        alone = [draw(http, seed) for seed in range(2)]
        id = submit(http, args.lines)
        start = time.perf_counter()
        with ThreadPoolExecutor(args.live) as pool:
            for seed in range(args.live):
                pool.submit(ask, seed)
                time.sleep(dice.expovariate(args.rate))
        seconds = time.perf_counter() - start
        counts = http.get(f"/v1/batches/{id}").json()["request_counts"]
        http.post(f"/v1/batches/{id}/cancel")
    if len(taken) < args.live:
        raise RuntimeError(f"only {len(taken)} of {args.live} live requests were answered")
    return {
        "case": "mixed", "model": args.model, "replicas": 2, "threads": 1, "live": args.live,
        "live_per_second": args.rate, "lines_meanwhile": counts["completed"], "seconds": seconds,
        "alone_seconds": statistics.median(alone), "p50_seconds": quantile(taken, 0.5),
        "p99_seconds": quantile(taken, 0.99),
    }  # fmt: skip


def submit(http: httpx.Client, lines: int) -> str:
    """The id of a batch that has begun."""
    tasks = [
        {"custom_id": f"line-{k}", "method": "POST", "url": kills.ENDPOINT,
         "body": {"prompt": PROMPTS[k % len(PROMPTS)], "seed": k}}
        for k in range(lines)
    ]  # fmt: skip
    content = "".join(json.dumps(task) + "\n" for task in tasks).encode()
    form = {"file": ("in.jsonl", content), "purpose": (None, "batch")}
    file = http.post("/v1/files", files=form).raise_for_status().json()["id"]
    body = {"input_file_id": file, "endpoint": kills.ENDPOINT, "completion_window": "24h"}
    id: str = http.post("/v1/batches", json=body).raise_for_status().json()["id"]
    while http.get(f"/v1/batches/{id}").json()["status"] == "validating":
        time.sleep(0.05)
    return id


def quantile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def killed(args: argparse.Namespace) -> list[dict[str, Any]]:
    found = [_read(path) for path in args.kills]
    if args.kill_lines:
        words = [f"--model={args.model}", f"--lines={args.kill_lines}",
                 f"--kills={args.kill_count}", f"--compare={args.compare}",
                 *(f"--server-flag={flag}" for flag in FLAGS)]  # fmt: skip
        found.append(asdict(replicas.run(words)))
    cuts = [{"case": "network", **_read(path)} for path in args.network]
    return [*({"case": "kills", **each} for each in found), *cuts]


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--model", default="mini")
    p.add_argument("--images", type=int, default=4, help="for each replica, at once")
    p.add_argument("--rounds", type=int, default=3, help="of both throughputs")
    p.add_argument("--live", type=int, default=40, help="interactive requests under mixed load")
    p.add_argument("--rate", type=float, default=0.3, help="of those in a second")
    p.add_argument("--lines", type=int, default=500, help="of the batch in the background")
    p.add_argument("--batch-lines", type=int, default=4, help="in a replica at once")
    p.add_argument("--kill-lines", type=int, default=24, help="0 leaves the soak out")
    p.add_argument("--kill-count", type=int, default=4)
    p.add_argument("--compare", type=int, default=3, help="pictures drawn again after the kills")
    p.add_argument("--kills", type=Path, action="append", default=[], metavar="FILE",
                   help="an outcome of tests.soak.replicas")  # fmt: skip
    p.add_argument("--network", type=Path, action="append", default=[], metavar="FILE",
                   help="an outcome of tests.soak.network")  # fmt: skip
    p.add_argument("--output", type=Path, default=results_writer.RESULTS / NAME)
    return p


def main() -> None:
    args = parser().parse_args()
    if (os.cpu_count() or 1) < 2:
        raise SystemExit("two single-threaded replicas need two cores")
    rows, gain = throughput(args)
    print(f"two replicas over one: {gain:.2f}x")
    rows += [mixed(args), *killed(args)]
    measured = {"two single-threaded replicas over one": gain}
    result = results_writer.results(NAME, rows, measured)
    results_writer.write(args.output, result)
    results_writer.print_verdicts(result)


if __name__ == "__main__":
    main()
