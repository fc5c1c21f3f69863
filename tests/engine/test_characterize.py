"""Attention watched while `tiny` draws, against teacher forcing on the finished pictures."""

import pytest
import torch
from torch import Tensor

from engine.characterize import Study, characterize, facts
from engine.engine import Engine
from engine.teacher import Pictures, encode_prompts, masked_attention, token_loss, whole_mask
from tests.engine.conftest import ask, draw, tiny_engine

PROMPTS = ("word1 word2", "word3")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine("native")


def test_what_was_watched_is_what_teacher_forcing_gives(engine: Engine) -> None:
    watcher = characterize(engine, Study(PROMPTS, seeds=2, batch=3))
    model, grid = engine.model, engine.model.grid
    sampling = model.sampling
    [tokens] = zip(*(draw(engine, ask(p, 0, n=2, sampling=sampling)) for p in PROMPTS), strict=True)
    drawn = torch.tensor([t for picture in tokens for t in picture])
    prompts = encode_prompts(model, [p for p in PROMPTS for _ in range(2)], grid)
    seen: list[Tensor] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, prompt: int) -> Tensor:
        n = q.shape[1] - prompt
        mask = whole_mask(torch.ones(1, 1, n, n).tril().bool(), prompt)
        score = torch.einsum("bthd,bjhd->bhtj", q, k) * q.shape[-1] ** -0.5
        weights = score.masked_fill(~mask, -torch.inf).softmax(-1)[:, :, prompt:]
        seen.append(weights[..., :prompt].sum(-1).mean((0, 2)))
        return masked_attention(q, k, v, mask)

    token_loss(model, grid, Pictures(prompts, drawn), attend)
    for layer, wanted in zip(watcher.layers, seen, strict=True):
        found = layer.regions.means()["prompt"].float()
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_facts_are_complete_and_watching_changes_nothing(engine: Engine) -> None:
    before = draw(engine, ask())
    study = Study(PROMPTS, seeds=2, batch=4)
    told: list[tuple[int, int, int]] = []
    found = facts(characterize(engine, study, lambda *words: told.append(words)), engine, study)
    assert draw(engine, ask()) == before
    shape = engine.model.shape
    assert len(found["heads"]) == shape.layers * shape.q_heads
    for head in found["heads"]:
        assert head["prompt"] + head["local"] + head["middle"] == pytest.approx(1, abs=1e-5)
        assert all(0 <= head[f"stable_{name}"] <= 1 for name in ("prompts", "seeds", "steps"))
    assert len(found["prefill"]) == shape.layers
    assert {told[-1][1], told[-1][2]} == {engine.model.grid.tokens}


def test_memory_does_not_grow_with_pictures(engine: Engine) -> None:
    def size(pictures: int) -> int:
        watcher = characterize(engine, Study(PROMPTS[:1], seeds=pictures, batch=2))
        layer = watcher.layers[0]
        tensors = [layer.regions.sums, layer.binned.sums, layer.offsets.sums, layer.similarity.sums]
        return sum(t.numel() for t in [*tensors, *layer.similarity._last])

    assert size(2) == size(6)
