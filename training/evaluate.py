"""Numbers and pictures of the shipped weights: what quantising costs, what captions are worth."""

import platform
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from engine.models.mini_text import MAX_WORDS, UNK
from engine.models.mini_vq import FSQTokenizer
from training.compose import Atlas, build_atlas, compose_batch, sprites_used
from training.export import Mini
from training.prompts import FIXED, NATURAL, UNKNOWN
from training.runs import autocast
from training.sample import Sampling, generate
from training.scenes import Scene, SceneBatch, SceneSampler, Split, draw_scenes, to_arrays
from training.sheets import contact_sheet, save_sheet
from training.sprites import SpritePack
from training.tokenizer import psnr, reconstruct
from training.transformer import MiniTransformer, token_loss

SEEDS: dict[Split, int] = {"train": 777, "pairs": 999, "styles": 998}
"""Validation scenes: the first from the training distribution, none of them seen in training."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Models:
    """One precision of the weights."""

    name: str
    tokenizer: FSQTokenizer
    transformer: MiniTransformer


@dataclass(frozen=True)
class Held:
    """Validation scenes of one split and their pictures."""

    split: Split
    batch: SceneBatch
    images: Float[Tensor, "n 3 h w"]


def hold(data: SpritePack, device: torch.device, scenes: int) -> list[Held]:
    """Draw the validation scenes of every split."""
    return [_held(data, device, split, seed, scenes) for split, seed in SEEDS.items()]


def measure(models: Models, held: list[Held]) -> list[Row]:
    """PSNR, codes in use and likelihoods of one precision."""
    device = held[0].images.device
    tokens, pixels = reconstruct(models.tokenizer, held[0].images)
    quality = psnr(held[0].images, pixels)
    rows = [
        _row("psnr", models, quality.mean(), "dB"),
        _row("psnr_se", models, quality.std() / len(quality) ** 0.5, "dB"),
        _row("l1", models, (held[0].images - pixels).abs().mean(), ""),
        _row("codes_used", models, torch.tensor(len(tokens.unique())), "of 4096"),
    ]
    for name, text, image in _likelihood_cases(models, held, device):
        mean, error = likelihood(models.transformer, text, image)
        rows += [_row(name, models, mean, "nats/token"), _row(f"{name}_se", models, error, "")]
    return rows


def _likelihood_cases(
    models: Models, held: list[Held], device: torch.device
) -> Iterator[tuple[str, Int64[Tensor, "n 32"], Int64[Tensor, "n 576"]]]:
    coded = {h.split: _encode(models.tokenizer, h, device) for h in held}
    text, image = coded["train"]
    yield "nll", text, image
    yield "nll_without_caption", torch.zeros_like(text), image
    yield "nll_wrong_caption", text.roll(1, 0), image
    yield "nll_held_out_pairs", *coded["pairs"]
    yield "nll_held_out_styles", *coded["styles"]


@torch.no_grad()
def likelihood(
    model: MiniTransformer, text: Int64[Tensor, "n 32"], image: Int64[Tensor, "n 576"]
) -> tuple[Tensor, Tensor]:
    """Mean negative log-likelihood a token over pictures, and its standard error."""
    losses = []
    for t, i in zip(text.split(1), image.split(1), strict=True):
        with autocast(text.device):
            losses.append(token_loss(model(t, i), model.embed.image.weight, i))
    each = torch.stack(losses)
    return each.mean(), each.std() / len(each) ** 0.5


def draw_sheets(mini: Mini, data: SpritePack, held: list[Held], folder: Path) -> dict[str, Any]:
    """Write every contact sheet; returns the captions and seeds that were drawn."""
    device = held[0].images.device
    _recon_sheet(mini, held[0], folder / "mini-reconstructions.jpg")
    shown: dict[str, Any] = {"sampling": asdict(mini.sampling), "seed": 0}
    for name, captions, columns in _sheets(data):
        images = draw(mini, captions, mini.sampling, device)
        save_sheet(contact_sheet(images, captions, columns), folder / f"mini-{name}.jpg")
        shown[name] = captions
    return shown


def draw(
    mini: Mini, captions: list[str], sampling: Sampling, device: torch.device, seed: int = 0
) -> Float[Tensor, "n 3 192 192"]:
    """Pictures of captions, all in one batch."""
    text = torch.tensor([mini.words.encode(c) for c in captions], device=device)
    tokens = generate(mini.transformer, text, sampling, seed)
    rows, columns = mini.transformer.config.grid
    with torch.no_grad():
        return torch.cat([mini.tokenizer.decode(part, rows, columns) for part in tokens.split(16)])


def sweep(mini: Mini, folder: Path, device: torch.device, cases: list[Sampling]) -> None:
    """The fixed prompts under several sampling settings, to choose the defaults by eye."""
    for case in cases:
        images = draw(mini, list(FIXED), case, device)
        name = f"sweep-g{case.guidance_scale:g}-p{case.top_p:g}-t{case.temperature:g}.jpg"
        save_sheet(contact_sheet(images, FIXED, 8, 1), folder / name)


def blank_share(images: Float[Tensor, "n 3 h w"]) -> float:
    """Share of pictures whose pixels hardly differ from the picture's smooth background."""
    rough = images - torch.nn.functional.avg_pool2d(images, 25, 1, 12, count_include_pad=False)
    busy = (rough.abs().amax(1) > 0.08).float().mean((1, 2))
    return float((busy < 0.005).float().mean())


def blank_row(mini: Mini, data: SpritePack, device: torch.device, count: int) -> Row:
    """Samples `count` unseen captions and counts blank pictures."""
    scenes = draw_scenes(data, count, 555)
    text = torch.from_numpy(to_arrays(scenes, mini.words).text).to(device).long()
    rows, columns = mini.transformer.config.grid
    tokens = [generate(mini.transformer, t, mini.sampling, i) for i, t in enumerate(text.split(64))]
    with torch.no_grad():
        parts = torch.cat(tokens).split(16)
        images = torch.cat([mini.tokenizer.decode(part, rows, columns) for part in parts])
    return {
        "name": "blank_share",
        "weights": "int8",
        "value": blank_share(images),
        "unit": "",
        "n": count,
    }


def results(rows: list[Row], commit: str, shown: dict[str, Any]) -> dict[str, Any]:
    """The results file: machine, versions, rows; targets are filled in from rows."""
    measured = {(r["name"], r["weights"]): r["value"] for r in rows}
    return {
        "machine": machine(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "commit": commit,
        "command": "python -m training.train " + " ".join(sys.argv[1:]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows": rows,
        "sheets": shown,
        "targets": [
            {
                "name": "mini_psnr",
                "target": 31.0,
                "measured": measured[("psnr", "int8")],
                "unit": "dB",
                "better": "higher",
            }
        ],
    }


def machine() -> dict[str, Any]:
    found: dict[str, Any] = {"cpu": platform.processor() or platform.machine()}
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return found


def _sheets(data: SpritePack) -> list[tuple[str, list[str], int]]:
    return [
        ("fixed-prompts", list(FIXED), 8),
        ("held-out-pairs", _captions(data, "pairs", 32), 8),
        ("held-out-styles", _captions(data, "styles", 16), 8),
        ("natural-prompts", list(NATURAL), 8),
        ("unknown-words", list(UNKNOWN), 8),
    ]


def _captions(data: SpritePack, split: Split, count: int) -> list[str]:
    """Captions of the split that name every style they are held out for."""
    sampler = SceneSampler(data, random.Random(SEEDS[split]), split)
    found: list[str] = []
    while len(found) < count:
        scene = sampler.sample()
        if split != "styles" or _names_styles(scene, data):
            found.append(sampler.tokenizer.decode(_ids(scene, sampler)))
    return found


def _names_styles(scene: Scene, data: SpritePack) -> bool:
    return all(data.styles[thing.style] in scene.words for thing in scene.things)


def _ids(scene: Scene, sampler: SceneSampler) -> list[int]:
    words = sampler.tokenizer.words
    ids = {word: i for i, word in enumerate(words)}
    return [ids.get(word, UNK) for word in scene.words[:MAX_WORDS]]


def _recon_sheet(mini: Mini, held: Held, path: Path) -> None:
    truth = held.images[:16]
    _, pixels = reconstruct(mini.tokenizer, truth)
    pairs = torch.stack([truth, pixels], 1).flatten(0, 1)
    quality = [f"{value:.1f} dB" for value in psnr(truth, pixels).tolist()]
    labels = [label for q in quality for label in ("scene", f"24 x 24 tokens, {q}")]
    save_sheet(contact_sheet(pairs, labels, 8, 1), path)


def _held(data: SpritePack, device: torch.device, split: Split, seed: int, scenes: int) -> Held:
    words = SceneSampler(data, random.Random(seed)).tokenizer
    batch = to_arrays(draw_scenes(data, scenes, seed, split), words)
    atlas: Atlas = build_atlas(data, device, sprites_used(batch))
    return Held(split, batch, compose_batch(atlas, batch))


@torch.no_grad()
def _encode(
    tokenizer: FSQTokenizer, held: Held, device: torch.device
) -> tuple[Int64[Tensor, "n 32"], Int64[Tensor, "n 576"]]:
    tokens = torch.cat([tokenizer.encode(part) for part in held.images.split(32)])
    return torch.from_numpy(held.batch.text).to(device).long(), tokens


def _row(name: str, models: Models, value: Tensor, unit: str) -> Row:
    return {"name": name, "weights": models.name, "value": round(float(value), 5), "unit": unit}
