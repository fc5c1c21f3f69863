"""What git tracks stays small, and importing starts nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MIB = 1 << 20


def tracked() -> dict[str, int]:
    """Bytes of every tracked file."""
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listing.returncode != 0:
        pytest.fail(f"needs git and a clone, not an unpacked archive: {listing.stderr}")
    names = [name for name in listing.stdout.split("\0") if name]
    return {name: (ROOT / name).stat().st_size for name in names if (ROOT / name).is_file()}


def test_tracked_files_stay_small() -> None:
    sizes = tracked()
    assert len(sizes) > 50
    assert sum(sizes.values()) <= 44 * MIB
    assets = {name: size for name, size in sizes.items() if name.startswith("assets/mini/")}
    assert sum(assets.values()) <= 32 * MIB
    assert max(sizes.values()) <= 16 * MIB, max(sizes, key=sizes.__getitem__)


IMPORT_EVERYTHING = """
import importlib, pkgutil, socket, sys
import torch

started = []
torch.cuda._lazy_init = lambda *a, **k: started.append("CUDA")
socket.socket.connect = lambda *a, **k: started.append("network")
for room in sys.argv[1:]:
    package = importlib.import_module(room)
    if hasattr(package, "__path__"):
        for found in pkgutil.walk_packages(package.__path__, room + "."):
            importlib.import_module(found.name)
assert not started, started
assert not torch.cuda.is_initialized()
try:
    torch.zeros(1, device="cuda")  # the trap itself must work
except Exception:
    pass
assert started == ["CUDA"], started
"""


def test_importing_starts_no_cuda_and_no_network() -> None:
    rooms = ["engine", "scheduler", "sparse_attn", "serving", "commands", "server", "cli"]
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_EVERYTHING, *rooms],
        cwd=ROOT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
