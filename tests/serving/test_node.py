"""OpenAI's Node client, unchanged, where node and npm are there to run it."""

import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

FOLDER = Path(__file__).parent / "node"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the client and the script that uses it."""
    for tool in ("node", "npm"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    folder = tmp_path_factory.mktemp("node")
    for name in ("package.json", "conformance.mjs"):
        shutil.copy(FOLDER / name, folder)
    quiet = ["--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"]
    done = subprocess.run(
        ["npm", "install", *quiet], cwd=folder, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    if done.returncode != 0:
        pytest.skip(f"npm cannot install the client: {done.stderr.strip()[:200]}")
    return folder


def test_node_client(installed: Path, http: httpx.Client) -> None:
    url = str(http.base_url).rstrip("/")
    done = subprocess.run(
        ["node", "conformance.mjs", url], cwd=installed, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "conformant"
