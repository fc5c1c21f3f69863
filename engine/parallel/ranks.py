"""The other ranks of a tensor-parallel engine, as its leader sees them.

The leader alone hears requests and tells events. Scheduler and noise are functions of what was
asked in which order, so the other ranks need no plans and no tokens: they are told the same things
before the same steps, and do the same. What crosses during a step are the sums of the layers.
"""

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

ROOT = Path(__file__).resolve().parents[2]

PATIENCE = timedelta(seconds=120)
"""How long a rank waits for the others within a step, or for them to start."""

FAREWELL = 5.0
"""Seconds for the other ranks to end by themselves."""

Command = tuple[str, Any]


class Ranks:
    """Ranks 1 .. size - 1, each a process that this one started; call `join` next."""

    def __init__(self, size: int, config: object) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="bishop-ranks-")
        self._path = str(Path(self._folder.name) / "store")
        self._store = FileStore(self._path, size)
        self._size, self._joined = size, False
        self._processes = [self._start(rank, config) for rank in range(1, size)]

    def join(self, device: torch.device) -> None:
        """Meet the others. Raises RuntimeError if one does not come, or if this process leads
        other ranks already."""
        if dist.is_initialized():
            raise RuntimeError("a process can lead one tensor-parallel engine, and this one does")
        try:
            meet(self._store, 0, self._size, device)
        except Exception as error:
            raise RuntimeError(self.fault(1.0) or f"the ranks did not meet: {error}") from error
        self._joined = True

    def wait_until_loaded(self) -> None:
        """Until every rank has its weights. Raises RuntimeError naming one that has ended."""
        while not all(self._store.check([ready(r)]) for r in range(1, self._size)):
            if (fault := self.fault()) is not None:
                raise RuntimeError(fault)
            time.sleep(0.02)

    def tell(self, commands: Sequence[Command]) -> None:
        """What was asked since the last step; the others then take the next one.

        Raises RuntimeError naming a rank that has ended."""
        frame = pickle.dumps(list(commands))
        try:
            for process in self._processes:
                _write(process, frame)
        except OSError as error:
            raise RuntimeError(self.fault(1.0) or f"a rank does not listen: {error}") from error

    def fault(self, seconds: float = 0.0) -> str | None:
        """Which rank has ended, if one has; it may take `seconds` until that shows."""
        end = time.monotonic() + seconds
        while True:
            for rank, process in enumerate(self._processes, start=1):
                if process.poll() is not None:
                    return self._fault_of(rank, process.returncode)
            if time.monotonic() >= end:
                return None
            time.sleep(0.02)

    def _fault_of(self, rank: int, code: int) -> str:
        key, said = last_words(rank), f"rank {rank} of {self._size} has ended (exit code {code})"
        if self._store.check([key]):
            said += f": {self._store.get(key).decode()}"
        return said

    def close(self) -> None:
        """End the other ranks. Idempotent."""
        for process in self._processes:
            if process.stdin is not None and not process.stdin.closed:
                _close_quietly(process)
        for process in self._processes:
            try:
                process.wait(FAREWELL)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._joined:
            self._joined = False
            dist.destroy_process_group()
        self._folder.cleanup()

    def _start(self, rank: int, config: object) -> "subprocess.Popen[bytes]":
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        process = subprocess.Popen(
            [sys.executable, "-m", "engine.parallel.follower"],
            stdin=subprocess.PIPE,
            stdout=sys.stderr.fileno() if _has_file(sys.stderr) else None,
            env=environment,
        )
        _write(process, pickle.dumps((config, rank, self._size, self._path)))
        return process


def last_words(rank: int) -> str:
    """The key under which a rank says why it ended."""
    return f"last-words-{rank}"


def ready(rank: int) -> str:
    """The key under which a rank says that it has loaded."""
    return f"ready-{rank}"


def meet(store: FileStore, rank: int, size: int, device: torch.device) -> None:
    """Join the group in which layers are summed."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the ranks are on one machine
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)


def _write(process: "subprocess.Popen[bytes]", frame: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(frame)
    process.stdin.flush()


def _close_quietly(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None
    try:
        process.stdin.close()
    except OSError:  # it is gone already
        return


def _has_file(stream: object) -> bool:
    try:
        stream.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return False
    return True
