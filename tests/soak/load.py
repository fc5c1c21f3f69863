"""Many clients at once: is any answer lost or mixed up, does memory grow, is /health prompt?

    python -m tests.soak.load --model mini --clients 200 --seconds 120 --json load.json

Clients take turns at random: single pictures, streams with partial pictures, requests that are
cancelled after a moment, wrong requests and huge ones. Prompts and seeds come from a small pool, so
that every picture is known from the first time it was drawn; at the end each is drawn once more,
alone. /health is asked by another process, which measures what a probe would.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx

from tests.soak.server import ServerProcess

ENDPOINT = "/v1/images/generations"
KINDS = ("short", "stream", "cancelled", "invalid", "huge")
WEIGHTS = (5, 3, 2, 2, 1)
POOL = 24
PROBE_SECONDS = 0.1
HUGE = 2 << 20
PATIENCE = 600.0
"""Seconds after which an answer counts as lost."""


@dataclass
class Outcome:
    """wrong must be 0. memory_growth: of the second half over the first, in bytes of RSS.

    memory_timeline: about 24 samples of it, evenly spread.

    lost: no answer, or a broken one. mixed_up: the picture of another request. refused: 429, with
    a Retry-After, which clients heed.
    """

    model: str
    clients: int
    seconds: float
    server_flags: list[str] = field(default_factory=list)
    answers: dict[str, int] = field(default_factory=dict)
    lost: int = 0
    mixed_up: int = 0
    refused: int = 0
    surprises: list[str] = field(default_factory=list)
    health_samples: int = 0
    health_failures: int = 0
    health_p50_ms: float = 0.0
    health_p99_ms: float = 0.0
    memory_first_half: int = 0
    memory_second_half: int = 0
    memory_timeline: list[int] = field(default_factory=list)
    still_running: int = 0

    @property
    def memory_growth(self) -> float:
        return self.memory_second_half - self.memory_first_half

    @property
    def wrong(self) -> int:
        return self.lost + self.mixed_up + self.health_failures + self.still_running


def picture_of(number: int) -> dict[str, Any]:
    return {"prompt": f"a blue cat {number}", "seed": 1000 + number}


class Load:
    def __init__(self, args: argparse.Namespace, server: ServerProcess) -> None:
        self._random = random.Random(args.seed)
        self._args, self._server = args, server
        self._known: dict[int, str] = {}
        self._answers: Counter[str] = Counter()
        self.outcome = Outcome(args.model, args.clients, args.seconds, args.server_flag)

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self._args.clients)
        options: dict[str, Any] = {"limits": limits, "timeout": PATIENCE, "trust_env": False}
        async with httpx.AsyncClient(base_url=self._server.url, **options) as http:
            end = time.monotonic() + self._args.seconds
            watching = asyncio.create_task(self._watch_memory(end))
            await asyncio.gather(*(self._client(http, end) for _ in range(self._args.clients)))
            await watching
            await self._draw_again(http)
            self.outcome.still_running = await self._running(http)
        self.outcome.answers = {kind: self._answers[kind] for kind in KINDS}

    async def _client(self, http: httpx.AsyncClient, end: float) -> None:
        while time.monotonic() < end:
            kind = self._random.choices(KINDS, WEIGHTS)[0]
            try:
                await getattr(self, f"_{kind}")(http)
                self._answers[kind] += 1
            except Refused as refused:
                self.outcome.refused += 1
                await asyncio.sleep(refused.seconds)
            except Exception as error:
                self.outcome.lost += 1
                self._surprise(f"{kind}: {type(error).__name__}: {error}")

    async def _short(self, http: httpx.AsyncClient) -> None:
        number = self._random.randrange(POOL)
        answer = await http.post(ENDPOINT, json=picture_of(number))
        self._expect(answer, 200)
        body = answer.json()["data"][0]
        self._judge(number, body["b64_json"], body["seed"])

    async def _stream(self, http: httpx.AsyncClient) -> None:
        number = self._random.randrange(POOL)
        body = picture_of(number) | {"stream": True, "partial_images": 2}
        async with http.stream("POST", ENDPOINT, json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
            self._expect(answer, 200)
            seed = int(answer.headers["x-bishop-seed"])
            lines = [line async for line in answer.aiter_lines()]
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        events: list[dict[str, Any]] = [json.loads(each) for each in data]
        types = [event["type"].rsplit(".", 1)[-1] for event in events]
        if types != ["partial_image", "partial_image", "completed"]:
            raise ValueError(f"events {types}")
        self._judge(number, events[-1]["b64_json"], seed)

    async def _cancelled(self, http: httpx.AsyncClient) -> None:
        body = picture_of(self._random.randrange(POOL)) | {"n": 2}
        try:
            async with asyncio.timeout(self._random.uniform(0.01, 0.5)):
                self._expect(await http.post(ENDPOINT, json=body), 200)
        except TimeoutError:
            return

    async def _invalid(self, http: httpx.AsyncClient) -> None:
        wrong = self._random.choice(
            ({"n": 99}, {"steps": 1}, {"size": "1x1"}, {"policy": "none"}, {"seed": -1})
        )
        answer = await http.post(ENDPOINT, json=picture_of(0) | wrong)
        self._expect(answer, 400)
        if answer.json()["error"]["param"] not in wrong:
            raise ValueError(answer.text)

    async def _huge(self, http: httpx.AsyncClient) -> None:
        size, status = self._random.choice(((32_000, 400), (HUGE, 413)))
        try:
            answer = await http.post(ENDPOINT, json={"prompt": "word " * (size // 5)})
        except (httpx.WriteError, httpx.RemoteProtocolError):
            if status != 413:
                raise
            return  # refused by its length alone, before it was sent
        self._expect(answer, status)

    def _expect(self, answer: httpx.Response, status: int) -> None:
        if answer.status_code == 429:
            raise Refused(float(answer.headers["retry-after"]))
        if answer.status_code != status:
            raise ValueError(f"{answer.status_code}: {answer.text[:200]}")

    def _judge(self, number: int, picture: str, seed: int) -> None:
        right = self._known.setdefault(number, picture) == picture and seed == 1000 + number
        if not right:
            self.outcome.mixed_up += 1
            self._surprise(f"another picture for number {number}, seed {seed}")

    async def _draw_again(self, http: httpx.AsyncClient) -> None:
        """Alone on the server, each picture must be what it was in the crowd."""
        for number in sorted(self._known):
            answer = await http.post(ENDPOINT, json=picture_of(number))
            body = answer.json()["data"][0]
            self._judge(number, body["b64_json"], body["seed"])

    async def _running(self, http: httpx.AsyncClient) -> int:
        """Pictures that are still drawn though everybody has left."""
        for _ in range(100):
            text = (await http.get("/metrics")).text
            values = [line.split()[1] for line in text.splitlines() if line.startswith(
                ("bishop:num_images_running ", "bishop:num_images_waiting "))]  # fmt: skip
            running = int(sum(map(float, values)))
            if len(values) == 2 and not running:
                return 0
            await asyncio.sleep(0.1)
        return max(1, running)

    async def _watch_memory(self, end: float) -> None:
        """RSS by halves of the time, the first tenth left out: caches fill then."""
        start = time.monotonic()
        samples: list[tuple[float, int]] = []
        while (now := time.monotonic()) < end:
            samples.append(((now - start) / (end - start), self._server.resident_bytes()))
            await asyncio.sleep(0.25)
        sizes = [size for _, size in samples]
        self.outcome.memory_timeline = sizes[:: max(1, len(sizes) // 24)]
        first = [size for at, size in samples if 0.1 <= at < 0.55]
        second = [size for at, size in samples if at >= 0.55]
        self.outcome.memory_first_half = int(statistics.mean(first or [0]))
        self.outcome.memory_second_half = int(statistics.mean(second or [0]))

    def _surprise(self, text: str) -> None:
        if len(self.outcome.surprises) < 20:
            self.outcome.surprises.append(text)


class Refused(Exception):  # noqa: N818
    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


def probe(url: str, results: Connection) -> None:
    """Ask /health ten times a second until told to stop; then send (ms, status) of each."""
    samples: list[tuple[float, int]] = []
    with httpx.Client(base_url=url, timeout=30, trust_env=False) as http:
        while not results.poll(PROBE_SECONDS):
            start = time.perf_counter()
            try:
                status = http.get("/health").status_code
            except httpx.HTTPError:
                status = 0
            samples.append((1000 * (time.perf_counter() - start), status))
    results.send(samples)


def measure(args: argparse.Namespace, folder: Path) -> Outcome:
    server = ServerProcess(folder, args.model, *args.server_flag)
    server.start()
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    prober = context.Process(target=probe, args=(server.url, there), daemon=True)
    prober.start()
    try:
        load = Load(args, server)
        asyncio.run(load.run())
        here.send("stop")
        samples: list[tuple[float, int]] = here.recv()
        prober.join(30)
    finally:
        server.kill()
    return _with_health(load.outcome, samples)


def _with_health(outcome: Outcome, samples: list[tuple[float, int]]) -> Outcome:
    times = sorted(ms for ms, _ in samples)
    outcome.health_samples = len(samples)
    outcome.health_failures = sum(status != 200 for _, status in samples)
    outcome.health_p50_ms = times[len(times) // 2]
    outcome.health_p99_ms = times[min(len(times) - 1, int(0.99 * len(times)))]
    return outcome


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("--model", default="tiny")
    p.add_argument("--clients", type=int, default=200)
    p.add_argument("--seconds", type=float, default=120)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--server-flag", action="append", default=[], help="passed to the server")
    p.add_argument("--json", type=Path, help="also write the outcome here")
    return p


def run(argv: list[str] | None = None) -> Outcome:
    args = parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        outcome = measure(args, Path(folder))
    told = {"wrong": outcome.wrong, "memory_growth": outcome.memory_growth}
    text = json.dumps(asdict(outcome) | told, indent=1)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")
    return outcome


if __name__ == "__main__":
    sys.exit(run().wrong > 0)
