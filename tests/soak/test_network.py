"""A short cut between two hosts; `python -m tests.soak.network` makes the one of 30 seconds."""

import json
import os
from pathlib import Path

import pytest

from tests.soak import network


def test_a_cut_and_its_healing_lose_nothing(tmp_path: Path) -> None:
    if (reason := network.why_not()) is not None:
        pytest.skip(reason)
    cut = os.environ.get("BISHOP_CUT_SECONDS", "4")
    file = tmp_path / "network.json"
    slow = ["--server-flag=--max-images=2", "--server-flag=--cache-mib=64"]
    sizes = ["--lines=40", "--compare=3", f"--cut={cut}", "--server-flag=--silent-seconds=1.5"]
    code = network.main([*sizes, *slow, f"--json={file}"])
    assert file.exists(), "it broke off; the captured output says why"
    outcome = json.loads(file.read_text())
    assert code == 0 and outcome["wrong"] == 0, outcome
    assert 0 < outcome["noticed_seconds"] < float(cut)
    assert outcome["restarts"] >= 1
