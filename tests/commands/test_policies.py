"""`bishop policies show`."""

from pathlib import Path

import pytest
from PIL import Image

from cli import main


def test_a_policy_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "policy.png"
    words = ["policies", "show", "--model", "tiny", "--policy", "window", "--sparsity", "0.5"]
    assert main([*words, "-o", str(path), "--position", "40", "--head", "1:0"]) == 0
    assert capsys.readouterr().out.strip() == str(path)
    with Image.open(path) as picture:
        colors = {color[:3] for _, color in picture.convert("RGB").getcolors(1 << 20) or []}
    assert {(0x08, 0x51, 0x9C), (0xE6, 0x55, 0x0D), (0xD9, 0xD9, 0xD9)} <= colors


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--position", "64"], "position 64"),
        (["--head", "9:0"], "no head 0 of layer 9"),
        (["--head", "x"], "--head: expected LAYER:HEAD"),
        (["--policy", "windw"], "unknown policy"),
        (["--size", "7"], "--size: expected"),
        (["--policy", "stencil", "--policy-option", "rows=0"], "at least 1"),
        (["-o", "nowhere/policy.png"], "cannot write"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["policies", "show", "--model", "tiny", "--sparsity", "0.5", *words]) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1
