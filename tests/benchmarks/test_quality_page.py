"""From the folders of studies to results files."""

import json
from pathlib import Path

import pytest
from PIL import Image

from benchmarks import docs, quality_page
from benchmarks.results_writer import check


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(quality_page, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(quality_page, "IMAGES", tmp_path / "images")
    monkeypatch.setattr(docs, "RESULTS", tmp_path / "results")
    return tmp_path


def cell(policy: str, sparsity: float, change: float, scene: float) -> dict[str, object]:
    row: dict[str, object] = {"cell": policy, "policy": policy, "sparsity": sparsity, "images": 4}
    row |= {"format": "bf16", "scene": scene, "agreement": 0.5}
    for name, value in (("sample_nll_change", change), ("scene_change", scene - 0.8)):
        row |= {name: value, f"{name}_low": value - 0.1, f"{name}_high": value + 0.1}
    return row


def test_targets_are_those_of_the_best_policy(elsewhere: Path) -> None:
    rows = [cell("dense", 0.0, 0.0, 0.8), cell("diagonal", 0.9, 0.5, 0.4),
            cell("indexed", 0.9, 0.04, 0.76), cell("indexed", 0.95, 0.1, 0.72)]  # fmt: skip
    (elsewhere / "evaluate.json").write_text(json.dumps(rows))
    Image.new("RGB", (8, 8)).save(elsewhere / "plot.png")
    quality_page.evaluate(elsewhere)
    result = json.loads((elsewhere / "results" / "evaluate-mini.json").read_text())
    check(result)
    measured = {t["name"]: t["measured"] for t in result["targets"]}
    assert measured["sample NLL above dense at 90 %"] == pytest.approx(0.04)
    assert measured["scene accuracy lost at 90 %"] == pytest.approx(5)
    assert measured["scene accuracy lost at 95 %"] == pytest.approx(10)
    shown = docs.render("rows evaluate-mini.json cell,sample_nll_change_95 kind=cell")
    assert "0.040 (-0.060 to 0.140)" in shown
    assert (elsewhere / "images" / "evaluate.png").is_file()
