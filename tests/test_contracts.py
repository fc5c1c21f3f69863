"""Who may import whom, as pyproject.toml says, and that the checker would notice."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("engine", "scheduler", "sparse_attn", "serving", "commands")
FRONT_ENDS = ("server.py", "cli.py")


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command as run; run()",
    ]
    return subprocess.run(
        [*command, "--no-cache"], cwd=folder, capture_output=True, text=True, timeout=120
    )


def test_the_rooms_keep_their_contracts() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


@pytest.mark.parametrize(
    ("room", "statement"),
    [
        ("scheduler", "import torch"),
        ("scheduler", "import engine"),
        ("sparse_attn", "from scheduler import plan"),
        ("engine", "import server"),
    ],
)
def test_a_broken_contract_is_noticed(room: str, statement: str, tmp_path: Path) -> None:
    for name in ROOMS:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / room / "intruder.py").write_text(statement + "\n")
    result = lint_imports(tmp_path)
    assert result.returncode != 0
    assert f"{room}.intruder" in result.stdout


def imported(path: Path) -> set[str]:
    """Top-level names that a file imports, wherever in the file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def modules() -> list[Path]:
    rooms = (path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    return [*rooms, *(ROOT / name for name in FRONT_ENDS)]


def test_nothing_imports_tests_benchmarks_or_training() -> None:
    for path in modules():
        tops = {name.split(".")[0] for name in imported(path)}
        assert not tops & {"tests", "benchmarks", "training"}, path


def test_only_ops_knows_the_compiled_module() -> None:
    users = [path for path in modules() if "sparse_attn._C" in imported(path)]
    assert users == [ROOT / "sparse_attn" / "ops.py"]


def test_kernels_know_no_torch() -> None:
    """Headers with arithmetic are free of torch, so that CPU and CUDA code can share them."""
    host = {"check.h", "arguments.h", "ops.h", "values.h", "storage.h", "parallel.h", "launch.h"}
    headers = [p for p in (ROOT / "csrc").rglob("*.*h") if p.name not in host]
    assert {"reads.h", "numeric.h", "attend.h", "multiply.h"} <= {p.name for p in headers}
    for path in headers:
        text = path.read_text()
        assert not any(f"<{library}/" in text for library in ("torch", "ATen", "c10")), path
