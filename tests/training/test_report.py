import json
from pathlib import Path

import pytest

from benchmarks import results_writer
from training import report
from training.sprites import SETS


def picture(sheet: str, prompt: str) -> report.Row:
    return {"kind": "picture", "sheet": sheet, "prompt": prompt}


ROWS = [
    {"kind": "measure", "name": "PSNR", "weights": "int8", "value": 31.5, "unit": "dB"},
    {"kind": "measure", "name": "PSNR", "weights": "trained", "value": 31.6, "unit": "dB"},
    {"kind": "measure", "name": "blank pictures", "value": 0, "unit": "pictures"},
    picture("fixed-prompts", "a cat"),
    picture("fixed-prompts", "a dog"),
    picture("held-out-pairs", "a cat and a dog"),
]


def judged(tmp_path: Path, *verdicts: str) -> list[report.Row]:
    shown = [row for row in ROWS if row["kind"] == "picture"]
    seen = [row | {"verdict": v, "remark": ""} for row, v in zip(shown, verdicts, strict=True)]
    path = tmp_path / "seen.json"
    path.write_text(json.dumps({"pictures": seen}))
    return report.judged_rows(ROWS, path)


def test_verdicts_are_counted_by_sheet(tmp_path: Path) -> None:
    rows = judged(tmp_path, "right", "partly", "right")
    found = {row["sheet"]: row for row in report.summary(rows)}
    assert found["fixed-prompts"] | {"right": 1, "partly": 1, "wrong": 0} == found["fixed-prompts"]
    targets = report.measured_targets(rows)
    assert targets["held-out pairs right"] == 1 and targets["fixed prompts right of 32"] == 1
    assert targets["reconstruction PSNR"] == 31.5 and targets["blank pictures"] == 0


def test_targets_exist_under_the_name_of_the_file(tmp_path: Path) -> None:
    targets = report.measured_targets(judged(tmp_path, "right", "right", "wrong"))
    assert len(results_writer.judged("quality-mini-training.json", targets)) == 4


def test_without_eyes_nothing_is_claimed() -> None:
    assert set(report.measured_targets(ROWS)) == {"reconstruction PSNR", "blank pictures"}


def test_every_picture_must_be_judged(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="look at fixed-prompts, 'a cat'"):
        judged(tmp_path, "splendid", "right", "right")


def test_the_card_needs_every_figure_and_names_every_set(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        report.model_card(ROWS)
    assert all(s.package in report.licences() and s.license in report.licences() for s in SETS)
