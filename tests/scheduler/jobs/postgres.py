"""A PostgreSQL server of its own, in a temporary folder, for as long as a test needs it."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNPRIVILEGED = "postgres"
FOLDERS = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)


def found(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([*map(str, FOLDERS), os.environ["PATH"]]))


def why_not() -> str | None:
    """Why no server can be started here; None if one can."""
    for name in ("initdb", "pg_ctl"):
        if found(name) is None:
            return f"{name} of PostgreSQL is not installed"
    if os.geteuid() == 0 and (shutil.which("runuser") is None or not _user_exists()):
        return f"PostgreSQL does not run as root, and there is no user {UNPRIVILEGED}"
    return None


def _user_exists() -> bool:
    return subprocess.run(["id", UNPRIVILEGED], capture_output=True, check=False).returncode == 0


class Server:
    """start, stop (at once, as after a crash) and the URL of its one database."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "data"
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        if os.geteuid() == 0:
            shutil.chown(folder, UNPRIVILEGED)
        self._run("initdb", "-D", str(self.folder), "-U", "bishop", "-A", "trust", "--no-sync")

    @property
    def url(self) -> str:
        return f"postgresql://bishop@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c fsync=off -k {self.folder}"
        log = str(self.folder / "log")
        self._run("pg_ctl", "-D", str(self.folder), "-l", log, "-w", "-o", options, "start")

    def stop(self) -> None:
        self._run("pg_ctl", "-D", str(self.folder), "-m", "immediate", "-w", "stop")

    def _run(self, name: str, *arguments: str) -> None:
        user = ["runuser", "-u", UNPRIVILEGED, "--"] if os.geteuid() == 0 else []
        command = [*user, str(found(name)), *arguments]
        quiet = subprocess.DEVNULL
        subprocess.run(command, check=True, stdout=quiet, stderr=quiet, cwd="/", timeout=60)


@contextmanager
def running(folder: Path) -> Iterator[Server]:
    server = Server(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()
