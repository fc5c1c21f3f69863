"""kill -9 at random moments: is every line of a batch there once, with the picture of its seed?

    python -m tests.soak.kills --model mini --lines 1000 --kills 20 --json soak.json

Lines that name a seed, lines that name none and lines that are wrong take turns. The server is
killed while the batch is validated, drawn and finalized, each time started again on the same jobs.
At the end every picture (or `--compare` of them) is drawn again as a single request.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.soak.server import ServerProcess

ENDPOINT = "/v1/images/generations"
ENDED = ("completed", "failed", "expired", "cancelled")
WRONG = 10
"""Every tenth line asks for what no server gives."""


@dataclass
class Outcome:
    """What became of a run. lost, doubled, misplaced, reseeded, different must all be 0.

    misplaced: in the wrong file. reseeded: not drawn from the seed the line names. different: not
    the picture that a single request with the reported seed draws.
    """

    model: str
    lines: int
    kills: int
    kills_at: list[int]
    server_flags: list[str] = field(default_factory=list)
    seconds: float = 0.0
    status: str = ""
    lost: int = 0
    doubled: int = 0
    misplaced: int = 0
    reseeded: int = 0
    different: int = 0
    compared: int = 0
    left_behind: int = 0
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def wrong(self) -> int:
        return (
            self.lost + self.doubled + self.misplaced + self.reseeded + self.different
            + self.left_behind + (self.status != "completed")
        )  # fmt: skip


def task(number: int) -> dict[str, Any]:
    body: dict[str, Any] = {"prompt": f"a red apple {number % 7}"}
    if number % WRONG == 0:
        body["n"] = 99
    elif number % 2:
        body["seed"] = number
    return {"custom_id": f"line-{number}", "method": "POST", "url": ENDPOINT, "body": body}


class Soak:
    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._random = random.Random(args.seed)
        self._args = args
        flags = ("--lease-seconds", "2", "--stop-seconds", "5", *args.server_flag)
        self._server = ServerProcess(folder, args.model, *flags)
        self._folder = folder
        self._http = httpx.Client(base_url=self._server.url, timeout=300)
        # Moments in lines done; -1 is while it is validated.
        moments = [-1, *(self._random.randrange(args.lines) for _ in range(args.kills - 1))]
        self._moments = sorted(moments[: args.kills])
        moments = list(self._moments)
        self.outcome = Outcome(args.model, args.lines, args.kills, moments, args.server_flag)

    def run(self) -> Outcome:
        start = time.monotonic()
        self._server.start()
        try:
            id = self._submit()
            for moment in self._moments:
                self._kill_at(id, moment)
            batch = self._wait(id)
            self.outcome.seconds = time.monotonic() - start
            self._judge(batch)
        finally:
            self._http.close()
            self._server.kill()
        return self.outcome

    def _submit(self) -> str:
        lines = b"".join(json.dumps(task(k)).encode() + b"\n" for k in range(self._args.lines))
        form = {"file": ("in.jsonl", lines), "purpose": (None, b"batch")}
        file = self._http.post("/v1/files", files=form).raise_for_status().json()["id"]
        body = {"input_file_id": file, "endpoint": ENDPOINT, "completion_window": "24h"}
        id: str = self._http.post("/v1/batches", json=body).raise_for_status().json()["id"]
        return id

    def _kill_at(self, id: str, moment: int) -> None:
        """Kill as soon as so many lines are done, plus a moment nobody chose."""
        while moment >= 0:
            batch = self._batch(id)
            counts = batch["request_counts"]
            done = counts["completed"] + counts["failed"]
            if batch["status"] in ENDED or (counts["total"] and done >= moment):
                break
            time.sleep(0.01)
        time.sleep(self._random.random() * self._args.jitter)
        self._server.kill()
        if self._args.verbose:
            print(f"killed at {moment} lines", file=sys.stderr, flush=True)
        self._server.start()

    def _batch(self, id: str) -> dict[str, Any]:
        batch: dict[str, Any] = self._http.get(f"/v1/batches/{id}").raise_for_status().json()
        return batch

    def _wait(self, id: str) -> dict[str, Any]:
        while (batch := self._batch(id))["status"] not in ENDED:
            time.sleep(0.1)
        return batch

    def _judge(self, batch: dict[str, Any]) -> None:
        outcome, wanted = self.outcome, {f"line-{k}": k for k in range(self._args.lines)}
        files = [self._records(batch[f"{kind}_file_id"]) for kind in ("output", "error")]
        found = Counter(record["custom_id"] for records in files for record in records)
        outcome.status, outcome.counts = batch["status"], batch["request_counts"]
        outcome.lost = len(wanted.keys() - found.keys())
        outcome.doubled = sum(found.values()) - len(found)
        for is_error, records in enumerate(files):
            wrong = [wanted[record["custom_id"]] % WRONG == 0 for record in records]
            outcome.misplaced += sum(each != bool(is_error) for each in wrong)
        self._compare(files[0], wanted)
        self._look_for_leftovers(batch)

    def _records(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        text = self._http.get(f"/v1/files/{file_id}/content").raise_for_status().text
        return [json.loads(line) for line in text.splitlines()]

    def _compare(self, records: list[dict[str, Any]], wanted: dict[str, int]) -> None:
        pictures = {r["custom_id"]: r["response"]["body"]["data"][0] for r in records}
        for id, picture in pictures.items():
            named = task(wanted[id])["body"].get("seed")
            self.outcome.reseeded += named not in (None, picture["seed"])
        count = len(pictures) if self._args.compare is None else self._args.compare
        for id in self._random.sample(sorted(pictures), min(count, len(pictures))):
            body = {**task(wanted[id])["body"], "seed": pictures[id]["seed"]}
            alone = self._http.post(ENDPOINT, json=body).raise_for_status().json()["data"][0]
            self.outcome.different += alone != pictures[id]
            self.outcome.compared += 1

    def _look_for_leftovers(self, batch: dict[str, Any]) -> None:
        """Every content in storage belongs to a file that is listed; a sweep may be under way."""
        kept = {batch[name] for name in ("input_file_id", "output_file_id", "error_file_id")}
        storage = self._folder / "jobs" / "storage"
        for _ in range(100):
            stored = {path.name for path in storage.rglob("*") if path.is_file()}
            if stored == kept - {None}:
                return
            time.sleep(0.1)
        self.outcome.left_behind = len(stored ^ (kept - {None}))


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("--model", default="tiny")
    p.add_argument("--lines", type=int, default=60)
    p.add_argument("--kills", type=int, default=3)
    p.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    p.add_argument("--jitter", type=float, default=0.3, help="seconds, at most, before a kill")
    p.add_argument("--compare", type=int, help="pictures to draw again; all if not given")
    p.add_argument("--server-flag", action="append", default=[], help="passed to the server")
    p.add_argument("--json", type=Path, help="also write the outcome here")
    p.add_argument("--verbose", action="store_true")
    return p


def run(argv: list[str] | None = None) -> Outcome:
    args = parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        outcome = Soak(args, Path(folder)).run()
    tell(outcome, args.json)
    return outcome


def tell(outcome: Outcome, file: Path | None) -> None:
    """Print an outcome, and keep it in a file."""
    text = json.dumps(asdict(outcome) | {"wrong": outcome.wrong}, indent=1)
    print(text)
    if file is not None:
        file.write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(run().wrong > 0)
