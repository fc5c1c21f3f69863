"""What holds for every family: images independent of their batch mates, every policy, partial
pictures, random weights."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.events import Partial
from engine.models.family import DecoderModel
from engine.models.options import LoadOptions
from engine.models.registry import PUBLISHED
from scheduler.request import PolicyChoice, RequestError, Sampling
from sparse_attn import attention, policies
from sparse_attn.attention import Backend
from sparse_attn.policy import Heads
from tests.engine.families import harness
from tests.engine.families.zoo import ZOO
from tests.sparse_attn.policies.strategies import random_index

SAMPLED = Sampling(guidance_scale=2.5, temperature=1.0, top_k=40, top_p=0.95)


def test_every_family_is_in_the_zoo() -> None:
    assert set(ZOO) == set(PUBLISHED)


@pytest.fixture(params=sorted(ZOO))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(family: str, tmp_path: Path) -> DecoderModel:
    return ZOO[family](tmp_path, harness.fast_backend())


@pytest.mark.parametrize("backend", harness.backends())
def test_an_image_ignores_its_batch_mates(family: str, backend: str, tmp_path: Path) -> None:
    """Every logit is the same bits alone and among prompts of other lengths."""
    model = ZOO[family](tmp_path, backend)  # type: ignore[arg-type]
    alone, seen = drawn(model, [harness.PROMPTS[1]])
    for others in ([harness.PROMPTS[0]], [harness.PROMPTS[2], "a", harness.PROMPTS[0], "x" * 30]):
        together, rows = drawn(model, [*others, harness.PROMPTS[1]])
        assert together[-1] == alone[0]
        for one, many in zip(seen, rows, strict=True):
            half = len(many) // 2
            assert many[half - 1].equal(one[0])
            assert many[-1].equal(one[1])


def drawn(
    model: DecoderModel, prompts: list[str]
) -> tuple[list[tuple[int, ...]], list[torch.Tensor]]:
    inner = model.logits
    recorder = harness.Recorder(model)
    asked = [harness.request(p, SAMPLED) for p in prompts]
    images = harness.draw(harness.engine_of(model), asked)
    model.logits = inner  # type: ignore[method-assign]
    return [image.tokens for image in images], recorder.seen


@pytest.mark.skipif(len(harness.backends()) < 2, reason="needs the native operators")
@pytest.mark.parametrize("choice", harness.policy_choices(), ids=lambda c: c.name)
def test_every_policy_reads_what_the_reference_reads(
    model: DecoderModel, choice: PolicyChoice
) -> None:
    """Row tokens, unequal prompts and GQA included: the same logits from both backends. Policies
    for study run on the reference alone, and say so."""
    rows, policy = (
        [],
        policies.build(
            choice.name,
            model.grid,
            Heads(model.shape.layers, model.shape.kv_heads),
            choice.sparsity,
        ),
    )
    for backend in harness.backends():
        if attention.why_not(policy, backend) is not None:
            with pytest.raises(RequestError, match="reference"):
                harness.engine_of(model, backend).add(harness.request("a", policy=choice), print)
            continue
        inner = model.logits
        recorder = harness.Recorder(model)
        asked = [harness.request(p, policy=choice) for p in harness.PROMPTS[:2]]
        harness.draw(harness.engine_of(model, backend), asked)
        model.logits = inner  # type: ignore[method-assign]
        rows.append(torch.stack(recorder.seen))
    assert rows[0].isfinite().all()
    assert (rows[0] - rows[-1]).abs().max() < 1e-4


@pytest.mark.skipif(len(harness.backends()) < 2, reason="needs the native operators")
def test_an_index_picks_what_the_reference_picks(model: DecoderModel, tmp_path: Path) -> None:
    shape, file = model.shape, tmp_path / "index.safetensors"
    index = random_index(model.grid, Heads(shape.layers, shape.kv_heads), shape.head_dim)
    replace(index, model=model.name).save(file)
    choice = PolicyChoice("indexed", 0.5, (("file", str(file)),))
    rows = []
    for backend in harness.backends():
        inner = model.logits
        recorder = harness.Recorder(model)
        asked = [harness.request(p, policy=choice) for p in harness.PROMPTS[:2]]
        harness.draw(harness.engine_of(model, backend), asked)
        model.logits = inner  # type: ignore[method-assign]
        rows.append(torch.stack(recorder.seen))
    assert (rows[0] - rows[1]).abs().max() < 1e-4


def test_bf16_follows_fp32(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and activations in bf16, KV too: finite, and near what fp32 gives for the prompt."""
    whole = ZOO[family](tmp_path / "fp32", "reference")
    plain = harness.options

    def in_bf16(backend: Backend | None = None, **values: object) -> LoadOptions:
        return plain(backend, dtype=torch.bfloat16, **values)

    monkeypatch.setattr(harness, "options", in_bf16)
    half = ZOO[family](tmp_path / "bf16", "reference")
    assert half.embed_prompt(torch.tensor([1, 2])).dtype == torch.bfloat16
    rows = []
    for model, kv in ((whole, "fp32"), (half, "bf16")):
        recorder = harness.Recorder(model)
        engine = harness.engine_of(model, "reference", kv_format=kv)
        harness.draw(engine, [harness.request("a cat")])
        rows.append(torch.stack(recorder.seen))
    assert rows[1].isfinite().all()
    error = (rows[0][0] - rows[1][0]).norm() / rows[0][0].norm()
    assert error < 0.05, f"relative error {error}"


def test_partial_pictures(model: DecoderModel) -> None:
    events: list[object] = []
    engine = harness.engine_of(model)
    engine.add(harness.request("a cat", partial_images=2), events.append)
    while engine.step():
        pass
    partial = [e for e in events if isinstance(e, Partial)]
    width, height = model.pixel_size
    assert [e.number for e in partial] == [0, 1]
    assert all(e.pixels.shape == (height, width, 3) for e in partial)


def test_too_long_a_prompt_is_refused(model: DecoderModel) -> None:
    with pytest.raises(ValueError, match=r"takes at most \d+"):
        model.encode_prompt("word " * 300, model.grid)


def test_unknown_sizes_are_refused(model: DecoderModel) -> None:
    with pytest.raises(ValueError, match="does not draw 17x19; it draws"):
        model.grid_of((17, 19))
