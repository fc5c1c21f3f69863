"""kill -9 of replicas while a batch and live requests are drawn: is every picture there once, and
the one of its seed?

    python -m tests.soak.replicas --model tiny --lines 500 --kills 20 --json replicas.json

A server with `--replicas` works on a batch, and a client asks for pictures without a pause. Each
kill takes one replica's process; the server puts another in its place. At the end every picture (or
`--compare` of them) is drawn again as a single request, without any kill.
"""

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.soak import kills

LIVE_SEEDS = 100_000
"""Seeds of live requests begin here."""


@dataclass
class Outcome(kills.Outcome):
    """live: pictures that the live client got. live_lost: answers other than the picture; "no
    replica is alive" is none of them, since the client may ask again, and counts as `waited`."""

    live: int = 0
    live_lost: int = 0
    live_different: int = 0
    waited: int = 0
    restarts: int = 0

    @property
    def wrong(self) -> int:
        return super().wrong + self.live_lost + self.live_different + (self.live == 0)


class Live(threading.Thread):
    """One picture after the other, until it is told to stop."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._http = httpx.Client(base_url=url, timeout=300, trust_env=False)
        self._enough = threading.Event()
        self.pictures: dict[int, Any] = {}
        self.lost: list[str] = []
        self.waited = 0

    def run(self) -> None:
        while not self._enough.is_set():
            self._ask(LIVE_SEEDS + len(self.pictures))

    def stop(self) -> None:
        self._enough.set()
        self.join()
        self._http.close()

    def _ask(self, seed: int) -> None:
        answer = self._http.post(kills.ENDPOINT, json=live_body(seed))
        if answer.status_code == 200:
            self.pictures[seed] = answer.json()["data"][0]
        elif answer.status_code == 503 and answer.json()["error"]["code"] == "no_replica":
            self.waited += 1
            time.sleep(0.1)
        else:
            self.lost.append(answer.text)
            self._enough.wait(0.5)


def live_body(seed: int) -> dict[str, Any]:
    return {"prompt": "a red apple", "seed": seed}


class ReplicaSoak(kills.Soak):
    outcome: Outcome

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        args.server_flag = [f"--replicas={args.replicas}", *args.server_flag]
        super().__init__(args, folder)
        self._moments = sorted(self._random.randrange(args.lines) for _ in range(args.kills))
        self.outcome = Outcome(
            args.model, args.lines, args.kills, list(self._moments), args.server_flag
        )

    def _start(self) -> None:
        self._server.start()

    def run(self) -> Outcome:
        self._start()
        live = Live(self._server.url)
        start = time.monotonic()
        try:
            live.start()
            id = self._submit()
            for moment in self._moments:
                self._kill_at(id, moment)
            batch = self._wait(id)
            live.stop()
            self.outcome.seconds = time.monotonic() - start
            self.outcome.restarts = sum(each["restarts"] for each in self._replicas())
            self._judge(batch)
            self._judge_live(live)
        finally:
            self._http.close()
            self._server.terminate()
        return self.outcome

    def _kill_at(self, id: str, moment: int) -> None:
        while not self._reached(id, moment):
            time.sleep(0.01)
        time.sleep(self._random.random() * self._args.jitter)
        os.kill(self._victim(), signal.SIGKILL)
        if self._args.verbose:
            print(f"killed one at {moment} lines", file=sys.stderr, flush=True)

    def _reached(self, id: str, moment: int) -> bool:
        batch = self._batch(id)
        counts = batch["request_counts"]
        done = counts["completed"] + counts["failed"]
        return batch["status"] in kills.ENDED or (counts["total"] and done >= moment)

    def _victim(self) -> int:
        """The process of a replica that lives; kills wait until there is one."""
        while True:
            there = [each for each in self._replicas() if each["pid"] is not None]
            busy = [each for each in there if each["pictures"]]
            if there:
                pid: int = self._random.choice(busy or there)["pid"]
                if _lives(pid):
                    return pid
            time.sleep(0.05)

    def _replicas(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (
            self._http.get("/v1/bishop/replicas").raise_for_status().json()["data"]
        )
        return found

    def _judge_live(self, live: Live) -> None:
        outcome = self.outcome
        outcome.live, outcome.live_lost = len(live.pictures), len(live.lost)
        outcome.waited = live.waited
        if live.lost:
            print(live.lost[0], file=sys.stderr)
        count = len(live.pictures) if self._args.compare is None else self._args.compare
        for seed in self._random.sample(sorted(live.pictures), min(count, len(live.pictures))):
            alone = self._http.post(kills.ENDPOINT, json=live_body(seed)).raise_for_status()
            outcome.live_different += alone.json()["data"][0] != live.pictures[seed]
            outcome.compared += 1


def _lives(pid: int) -> bool:
    """A process that was killed a moment ago may still be listed."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def run(argv: list[str] | None = None) -> Outcome:
    parser = kills.parser()
    parser.description = (__doc__ or "").split("\n")[0]
    parser.add_argument("--replicas", type=int, default=2)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        outcome = ReplicaSoak(args, Path(folder)).run()
    kills.tell(outcome, args.json)
    return outcome


if __name__ == "__main__":
    sys.exit(run().wrong > 0)
