"""`bishop evaluate` on `tiny`."""

import json
from pathlib import Path

import pytest

import engine.judges.features
import engine.judges.lpips
from cli import main


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise RuntimeError("not here")

    monkeypatch.setattr(engine.judges.features, "efficientnet", missing)
    monkeypatch.setattr(engine.judges.lpips.Distance, "installed", missing)


def test_a_table_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text('{"prompt": "word1", "tag": "a", "include": []}\n')
    words = ["evaluate", "--model", "tiny", "--prompts", str(prompts), "-o", str(out)]
    words += ["--images", "2", "--policies", "dense,window,lines", "--sparsity", "0.5,0.99"]
    assert main(words) == 0
    told = capsys.readouterr()
    assert "lines-0.99-bf16 is left out" in told.err and "left out: not here" in told.err
    rows = {row["cell"]: row for row in json.loads((out / "evaluate.json").read_text())}
    assert {"dense, other seeds", "dense-bf16", "window-0.5-bf16", "window-0.99-bf16"} <= set(rows)
    assert rows["window-0.99-bf16"]["kl"] > rows["window-0.5-bf16"]["kl"] > 0
    assert (out / "table.md").read_text() in told.out
    assert (out / "plot.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kv", "tierd"], "--kv: unknown format 'tierd'"),
        (["--sparsity", "much"], "--sparsity: expected numbers"),
        (["--policies", "diagonal+4"], "cannot read the policy"),
        (["--suite", "geneval"], "go together"),
        (["--suite", "geneval", "--scorer", "nowhere:x"], "cannot load"),
        (["--held-out", "nothing"], "cannot read the pictures"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("word1\n")
    given = ["evaluate", "--model", "tiny", "--prompts", str(prompts), "-o", str(tmp_path / "out")]
    assert main([*given, *words]) == 2
    told = [line for line in capsys.readouterr().err.splitlines() if "left out" not in line]
    assert len(told) == 1 and said in told[0]
