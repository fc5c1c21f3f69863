"""Calibration and teacher forcing on the preset `tiny`, and images drawn with what came of it."""

from pathlib import Path

import pytest
import torch

from engine import calibrate
from engine.engine import Engine
from engine.models.mini import Mini
from engine.teacher import Pictures, policy_loss
from scheduler.request import PolicyChoice, RequestError, Sampling
from sparse_attn import policies
from sparse_attn.format import FORMATS
from sparse_attn.policies.index_file import IndexFile
from sparse_attn.policies.stencil_file import StencilFile
from sparse_attn.policy import Heads
from tests.engine.conftest import ask, draw, tiny_engine
from tests.engine.test_mini import full_logits

HEADS = Heads(2, 2)


@pytest.fixture(scope="module")
def drawn() -> tuple[Mini, Pictures]:
    engine = tiny_engine("native")
    [tokens] = draw(engine, ask(n=3, sampling=Sampling(1.0)))
    model = engine.model
    assert isinstance(model, Mini)
    prompt = model.encode_prompt("word1 word2", model.grid)
    return model, Pictures(torch.tensor([prompt] * 3), torch.tensor(tokens))


@pytest.fixture(scope="module")
def files(drawn: tuple[Mini, Pictures], tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, pictures = drawn
    folder = tmp_path_factory.mktemp("files")
    statistics = calibrate.observe(model, model.grid, pictures)
    calibrate.index_file(model, model.grid, statistics).save(folder / "index.safetensors")
    calibrate.stencil_file(model, model.grid, statistics).save(folder / "stencil.yaml")
    return folder


def test_dense_loss_is_that_of_full_attention(drawn: tuple[Mini, Pictures]) -> None:
    model, pictures = drawn
    dense = policies.build("dense", model.grid, HEADS)
    loss, reads = policy_loss(model, pictures, dense, batch=2)
    prompt = pictures.prompts[0].tolist()[:-1]
    for tokens, found in zip(pictures.tokens, loss, strict=True):
        logits = full_logits(model.config, prompt, tokens.tolist())
        expected = torch.nn.functional.cross_entropy(logits, tokens, reduction="none")
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert reads == (model.grid.tokens - 1 + 1) / 2


def test_less_read_is_more_lost_and_eight_bits_lose_little(
    drawn: tuple[Mini, Pictures], files: Path
) -> None:
    model, pictures = drawn
    options = {"file": str(files / "index.safetensors"), "dims": 16}

    def loss(name: str, sparsity: float = 0.0, format: str | None = None) -> torch.Tensor:
        chosen = options if name == "indexed" else {}
        policy = policies.build(name, model.grid, HEADS, sparsity, chosen, "tiny")
        return policy_loss(model, pictures, policy, format and FORMATS[format])[0]

    dense = loss("dense")
    assert torch.allclose(loss("indexed"), dense, atol=1e-4)
    away = {name: (loss(name, 0.9) - dense).abs().mean() for name in ("indexed", "window")}
    assert 0 < away["indexed"] < away["window"]
    assert (loss("dense", format="int8") - dense).abs().mean() < away["indexed"] / 2


def test_files_read_back(drawn: tuple[Mini, Pictures], files: Path) -> None:
    index = IndexFile.load(files / "index.safetensors")
    assert index.dims == 16
    identity = torch.eye(16).expand(2, 2, -1, -1)
    torch.testing.assert_close(index.basis.mT @ index.basis, identity, rtol=0, atol=1e-5)
    assert (index.step.diff(dim=-1) <= 0).all(), "directions come in order of variance"
    assert (index.lost.diff(dim=-1) <= 0).all()
    assert (index.lost_beside_first_row <= index.lost + 1e-6).all()
    stencil = StencilFile.load(files / "stencil.yaml")
    assert set(stencil.stencils) == set(calibrate.SPARSITIES)


@pytest.mark.parametrize("sparsity", calibrate.SPARSITIES)
def test_calibrated_stencils_hold_more_than_the_built_in(
    drawn: tuple[Mini, Pictures], files: Path, sparsity: float
) -> None:
    model, pictures = drawn
    mass = torch.stack(
        [s.mass for s in calibrate.observe(model, model.grid, pictures)]
    )  # [L, H, N - 1, N - 1]
    held = {}
    for name, file in (("fitted", {"file": str(files / "stencil.yaml")}), ("built in", {})):
        policy = policies.build("stencil", model.grid, HEADS, sparsity, file, "tiny")
        masks = torch.stack([_reads(policy, layer) for layer in range(2)])
        held[name] = float((mass * masks).sum())
    assert held["fitted"] > held["built in"]


def _reads(policy: policies.ReadPolicy, layer: int) -> torch.Tensor:
    from sparse_attn.teacher import read_sets

    n = policy.grid.tokens - 1
    x = torch.zeros(1, n, 2, 16)
    return read_sets(policy, layer, x, x, x[:, :1], 1.0)[0]


def choice(files: Path, sparsity: float, **options: object) -> PolicyChoice:
    given = {"file": str(files / "index.safetensors"), "dims": 16} | options
    return PolicyChoice("indexed", sparsity, tuple(given.items()))  # type: ignore[arg-type]


def test_reading_everything_by_the_index_draws_what_dense_draws(files: Path) -> None:
    greedy = Sampling(1.0, temperature=0.0)
    dense = draw(tiny_engine("native", kv_format="fp32"), ask(sampling=greedy))
    indexed = ask(sampling=greedy, policy=choice(files, 0.0))
    assert draw(tiny_engine("native", kv_format="fp32"), indexed) == dense


@pytest.mark.parametrize("options", [{}, {"rerank": True, "share": 2}, {"resident": 0.5}])
@pytest.mark.parametrize("format", ["fp32", "int8"])
def test_same_picture_alone_and_among_others(
    files: Path, options: dict[str, object], format: str
) -> None:
    mine = ask(policy=choice(files, 0.8, **options))
    [alone] = draw(tiny_engine("native", kv_format=format), mine)
    others = [ask(seed=9 + i, policy=choice(files, 0.8, **options)) for i in range(4)]
    mine = ask(policy=choice(files, 0.8, **options))
    assert draw(tiny_engine("native", kv_format=format), *others, mine)[-1] == alone


def test_both_backends_draw_the_same_picture(files: Path) -> None:
    request = {"policy": choice(files, 0.8), "sampling": Sampling(1.0, temperature=0.0)}
    native = draw(tiny_engine("native", kv_format="fp32"), ask(**request))
    assert draw(tiny_engine("reference", kv_format="fp32"), ask(**request)) == native


def test_a_model_without_an_index_says_how_to_make_one() -> None:
    engine: Engine = tiny_engine("native")
    with pytest.raises(RequestError, match=r"cannot read the index file.*bishop calibrate"):
        engine.add(ask(policy=PolicyChoice("indexed", 0.9)), lambda _event: None)
