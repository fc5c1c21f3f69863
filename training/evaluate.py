"""Numbers and pictures of the shipped weights: what quantising costs, what captions are worth."""

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
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

BLANK = "blank pictures"
ROUNDED = "int8 rounded again"
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


def hold(data: SpritePack, device: torch.device, scenes: int, reconstructed: int) -> list[Held]:
    """Draw the validation scenes of every split; more of the first, for the image tokenizer."""
    counts = {"train": max(scenes, reconstructed)}
    return [_held(data, device, s, seed, counts.get(s, scenes)) for s, seed in SEEDS.items()]


def measure(models: Models, held: list[Held], every_case: bool = True) -> list[Row]:
    """PSNR, codes in use and likelihoods of one precision; only the first likelihood if told."""
    tokens, pixels = reconstruct(models.tokenizer, held[0].images)
    quality, pictures = psnr(held[0].images, pixels), len(pixels)
    l1 = (held[0].images - pixels).abs().mean()
    error = float(quality.std() / pictures**0.5)
    rows = [
        _row("PSNR", models, quality.mean(), "dB", pictures, error),
        _row("mean absolute error", models, l1, "of 1", pictures),
        _row("codes used", models, float(len(tokens.unique())), "of 4096", pictures),
    ]
    for name, text, image in _likelihood_cases(models, held):
        mean, error = likelihood(models.transformer, text, image)
        rows.append(_row(name, models, mean, "nats/token", len(text), error))
        if not every_case:
            break
    return rows


def _likelihood_cases(
    models: Models, held: list[Held]
) -> Iterator[tuple[str, Int64[Tensor, "n 32"], Int64[Tensor, "n 576"]]]:
    count = min(len(h.images) for h in held)
    coded = {h.split: _encode(models.tokenizer, h, count) for h in held}
    text, image = coded["train"]
    yield "NLL", text, image
    yield "NLL without caption", torch.zeros_like(text), image
    yield "NLL with the wrong caption", text.roll(1, 0), image
    yield "NLL of held-out pairs", *coded["pairs"]
    yield "NLL of held-out styles", *coded["styles"]


@torch.no_grad()
def likelihood(
    model: MiniTransformer, text: Int64[Tensor, "n 32"], image: Int64[Tensor, "n 576"]
) -> tuple[float, float]:
    """Mean negative log-likelihood a token over pictures, and its standard error."""
    losses = []
    for t, i in zip(text.split(1), image.split(1), strict=True):
        with autocast(text.device):
            losses.append(token_loss(model(t, i), model.embed.image.weight, i))
    each = torch.stack(losses)
    return float(each.mean()), float(each.std() / len(each) ** 0.5)


def draw_sheets(mini: Mini, data: SpritePack, held: list[Held], folder: Path) -> list[Row]:
    """Write every contact sheet; returns what is on them, and how many pictures are blank."""
    _recon_sheet(mini, held[0], folder / "mini-reconstructions.jpg")
    rows, blank, drawn = list[Row](), 0, 0
    for name, captions, columns in sheet_prompts(data):
        images = draw(mini, captions, mini.sampling, held[0].images.device)
        save_sheet(contact_sheet(images, captions, columns), folder / f"mini-{name}.jpg")
        rows += [{"kind": "picture", "sheet": name, "prompt": c} for c in captions]
        blank, drawn = blank + count_blank(images), drawn + len(images)
    sampling = {"kind": "sampling", **asdict(mini.sampling), "seed": 0}
    found = {"kind": "measure", "name": BLANK, "value": blank, "unit": "pictures", "n": drawn}
    return [sampling, *rows, found]


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


def quantising_rows(rows: list[Row]) -> list[Row]:
    """What INT8 costs, on the same scenes: against the weights before rounding where they are at
    hand, and in any case what a second rounding error of the same size costs."""
    values = {(r["name"], r.get("weights")): r["value"] for r in rows if "value" in r}
    pairs = (("trained", "int8", "trained less INT8"), ("int8", ROUNDED, "INT8 less rounded again"))
    return [
        {
            "kind": "quantising",
            "name": f"{name}: {label}",
            "value": round(values[name, first] - values[name, second], 5),
            "unit": unit,
        }
        for first, second, label in pairs
        for name, unit in (("PSNR", "dB"), ("NLL", "nats/token"))
        if (name, first) in values and (name, second) in values
    ]


def data_rows(data: SpritePack, mini: Mini) -> list[Row]:
    """How much there is to draw and to say."""
    held = SceneSampler(data, random.Random(0)).held_styles
    sizes = {"concepts": data.concepts, "sprites": data.sprites, "words": mini.words.words}
    sizes |= {"held-out concept and style": held}
    return [{"kind": "data", "name": n, "value": len(items)} for n, items in sizes.items()]


def count_blank(images: Float[Tensor, "n 3 h w"]) -> int:
    """Pictures whose pixels hardly differ from the picture's own smooth background."""
    rough = images - torch.nn.functional.avg_pool2d(images, 25, 1, 12, count_include_pad=False)
    busy = (rough.abs().amax(1) > 0.08).float().mean((1, 2))
    return int((busy < 0.005).sum())


def sheet_prompts(data: SpritePack) -> list[tuple[str, list[str], int]]:
    """Name, captions and columns of each contact sheet of samples."""
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
    tokenizer: FSQTokenizer, held: Held, count: int
) -> tuple[Int64[Tensor, "n 32"], Int64[Tensor, "n 576"]]:
    tokens = torch.cat([tokenizer.encode(part) for part in held.images[:count].split(32)])
    return torch.from_numpy(held.batch.text[:count]).to(tokens.device).long(), tokens


def _row(
    name: str, models: Models, value: Tensor | float, unit: str, n: int, error: float | None = None
) -> Row:
    row: Row = {"kind": "measure", "name": name, "weights": models.name}
    row |= {"value": round(float(value), 5), "unit": unit}
    return row | {"n": n} | ({} if error is None else {"standard_error": round(error, 5)})
