"""Both trainers, export and the sampler on toy sizes, on the CPU."""

import json
import random
from itertools import islice, repeat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from engine.models.mini_vq import FSQTokenizer, FSQTokenizerConfig
from training import export
from training.compose import build_atlas
from training.evaluate import count_blank, likelihood
from training.fit import TransformerTrainer, fit_transformer, token_batches
from training.lexicon import build_tokenizer
from training.optim import Budget, Muon, cosine_after, linear_after, orthogonalize
from training.perceptual import PerceptualDistance
from training.runs import Log, load
from training.sample import CachedDecoder, Sampling, generate, pick
from training.scenes import SceneBatch, SceneSampler, draw_scenes, to_arrays
from training.sheets import contact_sheet, save_sheet
from training.sprites import SpritePack
from training.stream import SceneStream
from training.tokenizer import TokenizerTrainer, fit_tokenizer, psnr, reconstruct
from training.transformer import MiniTransformer, TransformerConfig

CPU = torch.device("cpu")
SMALL = FSQTokenizerConfig((8, 8, 8), (1, 1, 1), (8, 8, 8), (1, 1, 1))
SHAPE = {"dim": 32, "layers": 2, "heads": 2, "head_dim": 16, "ffn": 48}


@pytest.fixture
def model() -> MiniTransformer:
    torch.manual_seed(0)
    return MiniTransformer(TransformerConfig(40, grid=(4, 4), **SHAPE))  # type: ignore[arg-type]


@pytest.fixture
def batch(pack: SpritePack) -> SceneBatch:
    words = SceneSampler(pack, random.Random(0)).tokenizer
    return to_arrays(draw_scenes(pack, 4, 1), words)


@pytest.fixture
def vgg(tmp_path: Path) -> Path:
    """Random weights in the shape of the perceptual network, thinner."""
    widths, weights = {1: 4, 2: 4, 3: 4, 4: 4}, dict[str, torch.Tensor]()
    last = 3
    for number, layers in {1: (0, 2), 2: (6, 8), 3: (12, 14, 16), 4: (20, 22, 24)}.items():
        for layer in layers:
            width = widths[number]
            weights[f"net_slice{number}_{layer}_weight"] = torch.randn(width, last, 3, 3) / 6
            weights[f"net_slice{number}_{layer}_bias"] = torch.zeros(width)
            last = width
        weights[f"lin{number - 1}_model_1_weight"] = torch.rand(1, last, 1, 1)
    for name in ("net_slice2_5_filt", "net_slice3_11_filt", "net_slice4_19_filt"):
        weights[name] = torch.full((4, 1, 3, 3), 1 / 9)
    weights["scaling_layer_shift"] = torch.zeros(1, 3, 1, 1)
    weights["scaling_layer_scale"] = torch.ones(1, 3, 1, 1)
    save_file(weights, tmp_path / "vgg.safetensors")
    return tmp_path / "vgg.safetensors"


def test_the_tokenizer_learns_and_resumes(
    pack: SpritePack, batch: SceneBatch, vgg: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    atlas, log = build_atlas(pack, CPU), Log(tmp_path)
    trainer = TokenizerTrainer(FSQTokenizer(SMALL), PerceptualDistance(vgg), Budget(0.5), False)
    path = tmp_path / "tokenizer.pt"
    fit_tokenizer(trainer, atlas, repeat(batch), path, log, 0.5, batch=2)
    again = TokenizerTrainer(FSQTokenizer(SMALL), PerceptualDistance(vgg), Budget(0.5), False)
    again.load_state_dict(load(path, CPU))
    assert again.steps == trainer.steps >= 5 and again.budget.fraction >= 1
    assert (tmp_path / "log.jsonl").read_text().count("tokenizer done") == 1
    assert torch.equal(again.model.decoder[0].weight, trainer.model.decoder[0].weight)


def test_the_transformer_learns_and_resumes(
    pack: SpritePack, batch: SceneBatch, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    atlas, words = build_atlas(pack, CPU), build_tokenizer(pack.concepts, pack.styles)
    config = TransformerConfig(len(words.words), **SHAPE)  # type: ignore[arg-type]
    tokenizer = FSQTokenizer(SMALL).eval()
    batches = token_batches(tokenizer, atlas, repeat(batch), size=4)
    validation = next(token_batches(tokenizer, atlas, repeat(batch), size=4))
    trainer = TransformerTrainer(MiniTransformer(config), Budget(0.5), False)
    before = trainer.validate(*validation)
    for _ in range(25):
        trainer.step(*validation)
    assert trainer.validate(*validation) < before - 0.05
    fit_transformer(trainer, batches, validation, tmp_path / "t.pt", Log(tmp_path), 0.2)
    again = TransformerTrainer(MiniTransformer(config), Budget(1000), False)
    again.load_state_dict(load(tmp_path / "t.pt", CPU))
    assert again.steps == trainer.steps > 29 and 0 < again.budget.fraction < 1
    assert again.scenes == 4 * again.steps
    assert again.validate(*validation) == pytest.approx(trainer.validate(*validation))


def test_cached_decoding_equals_teacher_forcing(model: MiniTransformer) -> None:
    text, image = torch.randint(0, 40, (3, 32)), torch.randint(0, 4096, (3, 16))
    with torch.no_grad():
        wanted = model(text, image)
        decoder = CachedDecoder(model, 3)
        hidden = [decoder.advance(model.embed_prefix(text))[:, -1:]]
        inputs = (model.embed_image(image[:, k : k + 1], k) for k in range(15))
        hidden += [decoder.advance(x) for x in inputs]
    torch.testing.assert_close(torch.cat(hidden, 1), wanted, atol=1e-5, rtol=1e-4)


def test_a_prediction_sees_only_what_came_before(model: MiniTransformer) -> None:
    text, image = torch.randint(0, 40, (1, 32)), torch.randint(0, 4096, (1, 16))
    changed = image.clone()
    changed[:, 9] += 1
    with torch.no_grad():
        same = (model(text, image) - model(text, changed)).abs().amax(2)[0] < 1e-6
    assert same[:10].all() and not same[10:].any()


def test_generation_follows_its_seed(model: MiniTransformer) -> None:
    text = torch.randint(1, 40, (2, 32))
    one, same, other = (generate(model, text, Sampling(), seed) for seed in (1, 1, 2))
    assert one.shape == (2, 16) and torch.equal(one, same) and not torch.equal(one, other)


def test_pick_obeys_top_k_and_top_p() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(2, 1)
    draws = {
        case: {int(pick(logits, case, torch.Generator().manual_seed(i))) for i in range(200)}
        for case in (Sampling(1, 1, 0, 1), Sampling(1, 1, 2, 1), Sampling(1, 1, 0, 0.7))
    }
    assert list(draws.values()) == [{0, 1, 2, 3}, {0, 1}, {0, 1}]


def test_export_round_trip(model: MiniTransformer, tmp_path: Path) -> None:
    words = build_tokenizer(["red apple"], ["flat"])
    export.write(tmp_path, words, FSQTokenizer(SMALL), model, Sampling(top_p=0.8))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["family"] == "mini" and config["sampling"]["top_p"] == 0.8
    stored = load_file(tmp_path / "transformer-00001-of-00001.safetensors")
    assert stored["layers.0.qkv.weight"].dtype == torch.int8
    assert stored["layers.0.qkv.weight.scale"].shape == (96,)
    assert stored["layers.0.q_norm.weight"].dtype == torch.float16
    back = export.read(tmp_path, CPU)
    assert back.words.words == words.words
    for name, value in model.state_dict().items():
        error = (back.transformer.state_dict()[name] - value).abs().max()
        assert error <= value.abs().max() / 250 + 1e-3, name


def test_quantising_rounds_each_row_to_nearest() -> None:
    matrix = torch.tensor([[1.0, -0.5, 0.25], [0.0, 0.0, 0.0], [1e-3, 2e-3, 4e-3]])
    values, scale = export.quantize_rows(matrix)
    assert values.dtype == torch.int8 and scale.dtype == torch.float16
    assert values[0].tolist() == [127, -64, 32] and not values[1].any()
    error = (values * scale.float()[:, None] - matrix).abs()
    assert (error <= scale.float()[:, None] / 2 + 1e-6).all()


def test_shards_stay_below_the_limit() -> None:
    weights = {str(i): torch.zeros(100, dtype=torch.int8) for i in range(7)}
    shards = export.split(weights, 250)
    assert [len(s) for s in shards] == [2, 2, 2, 1]


def test_orthogonalize_makes_singular_values_equal() -> None:
    torch.manual_seed(0)
    for shape in ((3, 32, 16), (2, 16, 48)):
        singular = torch.linalg.svdvals(orthogonalize(torch.randn(shape)))
        assert singular.min() > 0.5 and singular.max() < 1.3


def test_muon_refuses_a_layer_without_gradient(model: MiniTransformer) -> None:
    optimizer = Muon(model, 1e-3)
    model.embed.image.weight.sum().backward()
    with pytest.raises(RuntimeError, match="gradient"):
        optimizer.step(1.0)


def test_schedules_start_at_one_and_end_near_zero() -> None:
    for schedule in (cosine_after, linear_after):
        assert schedule(0) == schedule(0.4) == 1
        assert schedule(0.75) < 1 and 0 < schedule(1) < 0.03 and schedule(1.5) == schedule(1)


def test_perceptual_distance_grows_with_the_difference(vgg: Path) -> None:
    distance, image = PerceptualDistance(vgg), torch.rand(2, 3, 48, 48)
    noise = torch.rand_like(image)
    near, far = (distance(image, torch.lerp(image, noise, w)) for w in (0.1, 0.7))
    assert distance(image, image) == 0 and 0 < near < far


def test_likelihood_is_that_of_uniform_guesses_before_training(model: MiniTransformer) -> None:
    text, image = torch.randint(0, 40, (2, 32)), torch.randint(0, 4096, (2, 16))
    mean, error = likelihood(model, text, image)
    assert mean == pytest.approx(float(torch.tensor(4096.0).log()), abs=0.2) and error >= 0


def test_blank_pictures_are_told_from_drawings() -> None:
    ramp = torch.linspace(0.2, 0.8, 192).expand(3, 192, 192)
    drawn = ramp.clone()
    drawn[:, 60:110, 60:110] = 1
    assert count_blank(torch.stack([ramp, ramp])) == 2
    assert count_blank(torch.stack([ramp, drawn])) == 1


def test_psnr_and_reconstruction() -> None:
    image = torch.full((1, 3, 16, 16), 0.5)
    assert psnr(image, image + 0.1).item() == pytest.approx(20, abs=1e-3)
    tokens, pixels = reconstruct(FSQTokenizer(SMALL), image)
    assert tokens.shape == (1, 4) and pixels.shape == image.shape


def test_sheets_stay_small(tmp_path: Path) -> None:
    torch.manual_seed(0)
    images = F.interpolate(torch.rand(12, 3, 64, 64), 192)
    save_sheet(contact_sheet(images, ["a noisy picture"] * 12, 4), tmp_path / "a" / "sheet.jpg")
    assert (tmp_path / "a" / "sheet.jpg").stat().st_size < 300 * 1024


def test_the_stream_draws_in_other_processes(pack: SpritePack, tmp_path: Path) -> None:
    pack.save(tmp_path)
    with SceneStream(tmp_path, seed=1, workers=1, depth=2) as stream:
        first, second = islice(stream, 2)
    assert first.text.shape == (1024, 32) and not (first.text == second.text).all()
    assert all(not worker.is_alive() for worker in stream.workers)
