"""Results files: what was measured, on which machine, with which versions, by which command.

    {"machine", "versions", "commit", "command", "date", "rows", "targets"}

`rows` is everything measured. `targets` has {name, target, measured, unit, better} for each target
that benchmarks/targets.yaml sets for a file of that name and that was measured; met or not.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TARGETS = ROOT / "benchmarks" / "targets.yaml"
KEYS = ("machine", "versions", "commit", "command", "date", "rows", "targets")
PACKAGES = ("torch", "transformers", "flexgen", "numpy")

Row = Mapping[str, Any]


def results(
    name: str,
    rows: Sequence[Row],
    measured: Mapping[str, float] | None = None,
    command: str | None = None,
) -> dict[str, Any]:
    """A results object for the file `name`. `measured`: target name -> figure.

    Raises ValueError if a measured name is no target of that file.
    """
    return {
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "command": command or " ".join(["python", *sys.orig_argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows": list(rows),
        "targets": judged(name, measured or {}),
    }


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Check and write a results file; the folder is made. Raises ValueError as `check` does."""
    check(result)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, sort_keys=False) + "\n", encoding="utf-8")


def print_verdicts(result: Mapping[str, Any]) -> None:
    """A line for each target: what was measured, and whether it was met."""
    for target in result["targets"]:
        verdict = "met" if met(target) else "missed"
        print(f"{target['name']}: {target['measured']:g} {target['unit']}, {verdict}")


def check(result: Mapping[str, Any]) -> None:
    """Raise ValueError naming the key if this is no results object."""
    if tuple(result) != KEYS:
        raise ValueError(f"a results file has the keys {KEYS}, got {tuple(result)}")
    if not isinstance(result["rows"], list) or not result["rows"]:
        raise ValueError("a results file without rows says nothing")
    for target in result["targets"]:
        if set(target) != {"name", "target", "measured", "unit", "better"}:
            raise ValueError(f"a target has name, target, measured, unit, better; got {target}")


def judged(name: str, measured: Mapping[str, float]) -> list[dict[str, Any]]:
    """The targets of the file `name` that were measured, in their order in targets.yaml."""
    known = targets().get(name, [])
    strangers = set(measured) - {target["name"] for target in known}
    if strangers:
        raise ValueError(f"{name} has no target {sorted(strangers)}; see benchmarks/targets.yaml")
    return [
        {
            "name": target["name"],
            "target": target["target"],
            "measured": measured[target["name"]],
            "unit": target["unit"],
            "better": target["better"],
        }
        for target in known
        if target["name"] in measured
    ]


def met(target: Mapping[str, Any]) -> bool:
    """Whether a judged target is met."""
    if target["better"] == "higher":
        return bool(target["measured"] >= target["target"])
    return bool(target["measured"] <= target["target"])


def targets() -> dict[str, list[dict[str, Any]]]:
    """benchmarks/targets.yaml: results file -> its targets."""
    loaded: dict[str, list[dict[str, Any]]] = yaml.safe_load(TARGETS.read_text(encoding="utf-8"))
    return loaded


def machine() -> dict[str, Any]:
    """Processor, cores, memory in GiB, and the GPU if there is one."""
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
        "system": platform.platform(),
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def versions() -> dict[str, str]:
    """Python and the packages that a figure depends on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def commit() -> str:
    """The checkout's commit, with "+changes" where the work tree differs; "unknown" outside git."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+changes" if _git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
