"""`bishop calibrate` on `tiny`."""

from pathlib import Path

import pytest
from PIL import Image

from cli import main

WORDS = ["calibrate", "--model", "tiny", "--sparsity", "0.8"]


def test_a_policy_file_and_its_price(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, path = tmp_path / "prompts.txt", tmp_path / "x.yaml"
    prompts.write_text("word1\nword2\n")
    words = [*WORDS, "--prompts", str(prompts), "--count", "3", "--held-out", "1", "-o", str(path)]
    assert main(words) == 0
    told = capsys.readouterr().out
    for name in ("stencil, calibrated", "diagonal", "window", str(path)):
        assert name in told
    with Image.open(path.with_suffix(".png")) as picture:
        assert picture.width > 100
    drawn = ["generate", "word1", "--model", "tiny", "--policy", "stencil", "--sparsity", "0.8"]
    option = ["--policy-option", f"file={path}", "-o", str(tmp_path / "out.png")]
    assert main([*drawn, *option]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--prompts: name a file"),
        (["--pictures", "nothing"], "cannot read the pictures"),
        (["--prompts", "x", "--row-bound", "1", "--resident-fraction", "0.5"], "not both"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, "-o", str(tmp_path / "x.yaml"), *words]) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1
