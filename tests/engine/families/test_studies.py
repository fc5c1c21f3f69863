"""Characterise and calibrate on families with prompts of any length, end-of-row tokens and GQA."""

from pathlib import Path

import pytest
import torch

from engine.characterize import Study, characterize, facts
from engine.compare import Comparison
from engine.fitting import Fit, fit
from engine.policy_files import policy_of
from engine.selfdrawn import Order, draw_pictures
from engine.teacher import Pictures
from tests.engine.families import harness
from tests.engine.families.zoo import ZOO


@pytest.mark.parametrize("family", ["emu3", "janus", "lumina-mgpt"])
def test_studies(family: str, tmp_path: Path) -> None:
    model = ZOO[family](tmp_path, harness.fast_backend())
    engine = harness.engine_of(model)
    pictures = draw_pictures(engine, Order(harness.PROMPTS, 4), tmp_path / "pictures")
    assert pictures.lengths is not None, "the prompts differ in length"
    study = Study(harness.PROMPTS, seeds=1, batch=2)
    heads = facts(characterize(engine, study), engine, study)["heads"]
    assert len(heads) == model.shape.layers * model.shape.q_heads
    assert all(h["prompt"] + h["local"] + h["middle"] == pytest.approx(1, abs=1e-4) for h in heads)
    rows = fit(model, pictures, Fit("stencil", (0.7,), held_out=2), tmp_path / "x.yaml",
               lambda *_: None)  # fmt: skip
    fitted = [row for row in rows if row["name"] == "stencil, calibrated"]
    assert fitted and fitted[0]["kl"] > 0
    assert policy_of(model, "stencil", 0.7, {"file": str(tmp_path / "x.yaml")})


def test_a_prompt_is_not_read_through_its_padding(tmp_path: Path) -> None:
    model = ZOO["emu3"](tmp_path, harness.fast_backend())
    prompts = [model.encode_prompt(text, model.grid) for text in harness.PROMPTS]
    tokens = torch.randint(model.shape.image_vocab, (3, model.grid.tokens))
    mixed = Pictures.of(prompts, tokens)
    found = Comparison(model, mixed).dense_nll
    for i, prompt in enumerate(prompts):
        alone = Comparison(model, Pictures(torch.tensor([prompt]), tokens[i : i + 1])).dense_nll
        assert float(alone[0]) == pytest.approx(float(found[i]), rel=1e-5)
    assert sum(len(part) for part in mixed.split(2)) == 3
    mixed.save(tmp_path / "mixed.safetensors")
    again = Pictures.load(tmp_path / "mixed.safetensors")
    assert again.lengths is not None and again.lengths.tolist() == [len(p) for p in prompts]
