"""A real `python server.py` in a process of its own, to be killed and watched."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]


class ServerProcess:
    """start, kill -9, terminate; always on the same port and over the same jobs."""

    def __init__(self, data: Path, model: str, *flags: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = data / "server.log"
        self._command = [
            sys.executable, "server.py", "--port", str(self.port), "--model", model,
            "--data", str(data / "jobs"), *flags,
        ]  # fmt: skip
        self._child: subprocess.Popen[bytes] | None = None

    def start(self, seconds: float = 180) -> None:
        """Returns when it is ready. Raises RuntimeError with its last words if it never is."""
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(self._command, cwd=ROOT, stdout=log, stderr=log)
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._child.poll() is None:
            try:
                if httpx.get(f"{self.url}/ready", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(0.05)
        self.kill()
        raise RuntimeError(f"the server did not start: {self.log.read_text()[-2000:]}")

    @property
    def alive(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def terminate(self) -> int:
        """SIGTERM; the exit code."""
        return self._end(signal.SIGTERM)

    def resident_bytes(self) -> int:
        assert self._child is not None
        fields = Path(f"/proc/{self._child.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def _end(self, how: signal.Signals) -> int:
        if self._child is None:
            return 0
        self._child.send_signal(how)
        code = self._child.wait(120)
        self._child = None
        return code
