"""Two hosts and a cable that is pulled: does a cut of the network lose or double a picture?

    python -m tests.soak.network --cut 30 --json network.json

The hosts are network namespaces (root and iproute2 are needed): one runs the head of a Ray cluster,
the server and one replica, the other one replica. While a batch and live requests are drawn, the
link between them goes down for `--cut` seconds and up again. At the end both replicas must draw.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.soak import kills, replicas
from tests.soak.server import ROOT

HEAD, FAR = "10.231.7.1", "10.231.7.2"
PORT = 6379
INSIDE = "BISHOP_SOAK_NAMESPACES"
HEALED_SECONDS = 180.0
"""Within this time after the link is back, both replicas must draw."""


@dataclass
class Outcome(replicas.Outcome):
    """noticed_seconds: from the cut until the server said "degraded". back_seconds: from the
    healing until both replicas drew. drawn_during_cut: live pictures and lines meanwhile."""

    cut_seconds: float = 0.0
    noticed_seconds: float = 0.0
    back_seconds: float = 0.0
    drawn_during_cut: int = 0

    @property
    def wrong(self) -> int:
        return super().wrong + (self.drawn_during_cut == 0) + (self.back_seconds > HEALED_SECONDS)


class NetworkSoak(replicas.ReplicaSoak):
    outcome: Outcome

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        args.server_flag = [f"--ray-address={HEAD}:{PORT}", *args.server_flag]
        super().__init__(args, folder)
        self._far = os.environ[INSIDE]
        self.outcome = Outcome(
            args.model, args.lines, 1, list(self._moments), args.server_flag, cut_seconds=args.cut
        )

    def _start(self) -> None:
        super()._start()
        self._until_engines(2, HEALED_SECONDS)

    def _kill_at(self, id: str, moment: int) -> None:
        """Pull the cable instead of killing, and wait until all is well again."""
        while not self._reached(id, moment):
            time.sleep(0.01)
        before = self._drawn()
        self._link("down")
        start = time.monotonic()
        self.outcome.noticed_seconds = self._until_engines(1, self._args.cut)
        time.sleep(max(0.0, start + self._args.cut - time.monotonic()))
        self.outcome.drawn_during_cut = self._drawn() - before
        self._link("up")
        self.outcome.back_seconds = self._until_engines(2, HEALED_SECONDS)

    def _link(self, state: str) -> None:
        _ip("-n", self._far, "link", "set", "veth0", state)

    def _until_engines(self, wanted: int, seconds: float) -> float:
        """Seconds until so many draw, or more than `seconds` if they never do."""
        start = time.monotonic()
        while (waited := time.monotonic() - start) <= seconds:
            if self._http.get("/health").json().get("engines", 0) == wanted:
                return waited
            time.sleep(0.05)
        return waited

    def _drawn(self) -> int:
        drawn: int = self._http.get("/v1/bishop/queue").json()["images_finished"]
        return drawn


def why_not() -> str | None:
    """Why two hosts cannot be made here, or None."""
    try:
        import ray  # noqa: F401
    except ImportError:
        return "needs the extra `ray`"
    try:
        with _hosts() as _:
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces cannot be made here (root and iproute2): {error}"


@contextmanager
def _hosts() -> Iterator[tuple[str, str]]:
    """Names of two network namespaces with a cable between them."""
    head, far = f"bishop-a{os.getpid()}", f"bishop-b{os.getpid()}"
    with ExitStack() as undo:
        for name in (head, far):
            _ip("netns", "add", name)
            undo.callback(_ip, "netns", "del", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", head, "link", "add", "veth0", "type", "veth", "peer", "name", "veth0",
            "netns", far)  # fmt: skip
        for name, address in ((head, HEAD), (far, FAR)):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "veth0")
            _ip("-n", name, "link", "set", "veth0", "up")
        yield head, far


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


@contextmanager
def _ray(folder: Path, namespace: str | None, *words: str) -> Iterator[None]:
    """A Ray node of one CPU that is started again when it ends, as an orchestrator would."""
    node = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1",
            "--object-store-memory=134217728", "--disable-usage-stats", *words]  # fmt: skip
    loop = 'while true; do "$@"; sleep 1; done'
    enter = [] if namespace is None else ["ip", "netns", "exec", namespace]
    with (folder / "ray.log").open("ab") as log:
        child = subprocess.Popen(
            [*enter, "bash", "-c", loop, "node", *node], cwd=ROOT, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield
    finally:
        _end(child.pid)
        child.wait(30)


def _end(session: int) -> None:
    """Every process of the session, whatever groups it has made."""
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            if int(fields[3]) == session:
                os.kill(int(entry.name), signal.SIGKILL)
        except (OSError, IndexError, ValueError):
            continue


def _inside(args: argparse.Namespace) -> Outcome:
    """On the first host."""
    far = os.environ[INSIDE]
    with tempfile.TemporaryDirectory(prefix="bn") as name, ExitStack() as undo:
        folder = Path(name)
        head = ["--head", f"--node-ip-address={HEAD}", f"--port={PORT}",
                "--include-dashboard=false", f"--temp-dir={name}/ray"]  # fmt: skip
        undo.enter_context(_ray(folder, None, *head))
        node = [f"--address={HEAD}:{PORT}", f"--node-ip-address={FAR}"]
        undo.enter_context(_ray(folder, far, *node))
        _until_ray(folder)
        try:
            return NetworkSoak(args, folder).run()
        except Exception:
            for log in (folder / "ray.log", folder / "server.log"):
                print(log.read_text()[-4000:] if log.exists() else log, file=sys.stderr)
            raise


def _until_ray(folder: Path) -> None:
    """Raises RuntimeError if the head does not come up."""
    for _ in range(600):
        if "Ray runtime started" in (folder / "ray.log").read_text():
            return
        time.sleep(0.1)
    raise RuntimeError(f"Ray did not start: {(folder / 'ray.log').read_text()[-2000:]}")


def _outside(argv: list[str]) -> int:
    """Make the hosts and run this again on the first; its exit code."""
    with _hosts() as (head, far):
        settings = {INSIDE: far, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        command = [sys.executable, "-m", "tests.soak.network", *argv]
        return subprocess.run(
            ["ip", "netns", "exec", head, *command], cwd=ROOT, env=os.environ | settings
        ).returncode


def parser() -> argparse.ArgumentParser:
    p = kills.parser()
    p.description = (__doc__ or "").split("\n")[0]
    p.add_argument("--cut", type=float, default=30.0, help="seconds")
    p.set_defaults(lines=300, kills=1, compare=20, replicas=2)
    return p


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    if INSIDE not in os.environ:
        return _outside(argv)
    outcome = _inside(args)
    kills.tell(outcome, args.json)
    return int(outcome.wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
