"""`bishop characterize` on `tiny`."""

import json
import re
from pathlib import Path

import pytest

from cli import main


def test_a_report_is_written_and_asks_for_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "word1", "truth": {}}\nword2 word3\n')
    words = ["characterize", "--model", "tiny", "--prompts", str(prompts), "--batch", "2"]
    assert main([*words, "-o", str(tmp_path / "report")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report" / "report.html")
    found = json.loads((tmp_path / "report" / "characterize.json").read_text())
    assert (found["pictures"], found["prompts"], found["seeds"]) == (4, 2, 2)
    page = (tmp_path / "report" / "report.html").read_text()
    assert page.count("<img") == 5
    assert not re.findall(r'(?:src|href)="(?!data:)', page) and "http" not in page
    for kind in {head["kind"] for head in found["heads"]}:
        assert kind in page


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "say what to draw"), ("{", "line 1: not JSON"), ('{"truth": 1}', "needs a `prompt`")],
)
def test_bad_prompt_files_are_one_line(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(text)
    assert main(["characterize", "--model", "tiny", "--prompts", str(prompts)]) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1
