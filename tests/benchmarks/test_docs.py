"""The documents show what the results files say."""

import json
from pathlib import Path

import pytest

from benchmarks import docs


def test_documents_are_up_to_date() -> None:
    """Run `python -m benchmarks.docs` after a new measurement."""
    assert docs.main(["--check"]) == 0


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    target = {"name": "fast", "target": 2, "measured": 3.14159, "unit": "x", "better": "higher"}
    result = {
        "machine": {"cpu": "Abacus", "cores": 2}, "versions": {"torch": "2.9"},
        "date": "2026-01-02T03:04", "command": "python x",
        "rows": [{"case": "a", "s": 0.12345}, {"case": "b", "s": 12345.6}],
        "targets": [target, target | {"measured": 1.0}],
    }  # fmt: skip
    (tmp_path / "r.json").write_text(json.dumps(result))
    monkeypatch.setattr(docs, "RESULTS", tmp_path)
    return tmp_path


def test_blocks_are_filled_and_the_rest_is_left_alone(results: Path) -> None:
    text = "before\n<!-- figures: rows r.json case,s case=a -->\nold\n<!-- end figures -->\nafter"
    filled = docs.fill(text)
    assert "| a | 0.123 |" in filled
    assert "old" not in filled
    assert "12,346" not in filled
    assert filled.startswith("before\n<!-- figures: rows r.json case,s case=a -->\n| case | s |")
    assert filled.endswith("<!-- end figures -->\nafter")
    assert docs.fill(filled) == filled


def test_targets_say_whether_they_are_met(results: Path) -> None:
    shown = docs.render("targets r.json")
    assert "| fast | 3.14 x | at least 2 | yes |" in shown
    assert "| fast | 1 x | at least 2 | **no** |" in shown
    assert "Abacus" in docs.render("where r.json")


def test_what_was_not_measured_says_so(results: Path) -> None:
    assert "Not measured yet" in docs.render("targets other.json")


@pytest.mark.parametrize("bad", ["plot r.json", "rows r.json case,wings"])
def test_mistakes_in_a_block_are_named(results: Path, bad: str) -> None:
    with pytest.raises(ValueError, match=r"plot|wings"):
        docs.render(bad)
