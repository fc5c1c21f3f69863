"""Results files: their schema, and that every committed one keeps it."""

import json
from pathlib import Path

import pytest

from benchmarks import results_writer as writer


def test_a_result_says_where_it_comes_from(tmp_path: Path) -> None:
    result = writer.results("mini-cpu.json", [{"seconds": 1.0}], {"mini loads": 2.0})
    writer.write(tmp_path / "new" / "r.json", result)
    read = json.loads((tmp_path / "new" / "r.json").read_text())
    assert tuple(read) == writer.KEYS
    assert read["machine"]["cores"] >= 1
    assert read["versions"]["torch"].startswith("2.")
    [target] = read["targets"]
    assert target == {
        "name": "mini loads", "target": 3, "measured": 2.0, "unit": "s", "better": "lower",
    }  # fmt: skip


def test_targets_are_met_on_the_better_side() -> None:
    target = {"name": "x", "target": 2.0, "unit": "x", "measured": 3.0}
    assert writer.met(target | {"better": "higher"})
    assert not writer.met(target | {"better": "lower"})
    assert writer.met(target | {"measured": 2.0, "better": "lower"})


def test_a_figure_without_a_target_is_refused() -> None:
    with pytest.raises(ValueError, match="no target"):
        writer.judged("mini-cpu.json", {"mini flies": 1.0})


@pytest.mark.parametrize("broken", [{"rows": []}, {"targets": [{"name": "x"}]}, {"more": 1}])
def test_what_is_no_results_object_is_refused(broken: dict[str, object]) -> None:
    result = writer.results("mini-cpu.json", [{"seconds": 1.0}]) | broken
    with pytest.raises(ValueError, match=r"rows|target|keys"):
        writer.check(result)


@pytest.mark.parametrize("path", sorted(writer.RESULTS.glob("*.json")), ids=lambda p: p.name)
def test_every_committed_result_keeps_the_schema(path: Path) -> None:
    result = json.loads(path.read_text(encoding="utf-8"))
    writer.check(result)
    known = {t["name"]: t for t in writer.targets().get(path.name, [])}
    for target in result["targets"]:
        assert known[target["name"]]["target"] == target["target"]


def test_targets_are_well_formed() -> None:
    for targets in writer.targets().values():
        names = [target["name"] for target in targets]
        assert len(names) == len(set(names))
        for target in targets:
            assert set(target) == {"name", "target", "unit", "better"}
            assert target["better"] in ("higher", "lower")
