"""Weights to and from `assets/mini`: INT8 matrices with one fp16 scale a row, the rest fp16."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from engine.models.mini_text import WordTokenizer
from engine.models.mini_vq import FSQTokenizer, FSQTokenizerConfig
from training.sample import Sampling
from training.transformer import MiniTransformer, TransformerConfig

SHARD_BYTES = 15 * 2**20


@dataclass(frozen=True)
class Mini:
    """The whole model as it lies in a folder."""

    words: WordTokenizer
    tokenizer: FSQTokenizer
    transformer: MiniTransformer
    sampling: Sampling


def quantize(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Matrices and convolutions as int8, symmetric per output row, next to `<name>.scale`."""
    packed: dict[str, Tensor] = {}
    for name, value in weights.items():
        if value.ndim < 2:
            packed[name] = value.detach().half().cpu().contiguous()
        else:
            packed[name], packed[f"{name}.scale"] = quantize_rows(value.detach().float().cpu())
    return packed


def quantize_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """int8 values and fp16 scales [rows] of a tensor [rows, ...], rounded to nearest."""
    rows = matrix.flatten(1)
    scale = (rows.abs().amax(1) / 127).clamp_min(2**-24).half()
    values = (rows / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
    return values.view_as(matrix).contiguous(), scale


def dequantize(packed: dict[str, Tensor]) -> dict[str, Tensor]:
    """The fp32 weights behind `quantize`."""
    names = [name for name in packed if not name.endswith(".scale")]
    return {name: _expand(packed, name) for name in names}


def write(
    folder: Path,
    words: WordTokenizer,
    tokenizer: FSQTokenizer,
    transformer: MiniTransformer,
    sampling: Sampling,
) -> None:
    """Fill a folder with everything the engine loads. Files stay below 16 MiB."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.safetensors"):
        old.unlink()
    words.to_file(folder / "vocab.json")
    config = transformer.config.to_dict() | {
        "tokenizer": tokenizer.config.to_dict(),
        "sampling": sampling.__dict__,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(quantize(tokenizer.state_dict()), folder / "tokenizer.safetensors")
    shards = split(quantize(transformer.state_dict()))
    for number, shard in enumerate(shards, 1):
        save_file(shard, folder / f"transformer-{number:05}-of-{len(shards):05}.safetensors")


def read(folder: Path, device: torch.device, noise: int | None = None) -> Mini:
    """Load what `write` wrote, as fp32 modules in evaluation mode.

    noise: seed of an error added to each weight that was rounded, as large as the rounding's own
        (uniform over one INT8 step). What it costs says what rounding cost, where the weights
        before rounding are gone.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tokenizer = FSQTokenizer(FSQTokenizerConfig.from_dict(config.pop("tokenizer")))
    sampling = Sampling(**config.pop("sampling"))
    transformer = MiniTransformer(transformer_config(config))
    generator = None if noise is None else torch.Generator().manual_seed(noise)
    _fill(tokenizer, load_file(folder / "tokenizer.safetensors"), generator)
    parts = [load_file(path) for path in sorted(folder.glob("transformer-*.safetensors"))]
    _fill(transformer, {k: v for part in parts for k, v in part.items()}, generator)
    words = WordTokenizer.from_file(folder / "vocab.json")
    return Mini(words, tokenizer.to(device).eval(), transformer.to(device).eval(), sampling)


def transformer_config(values: dict[str, Any]) -> TransformerConfig:
    """From `config.json` without its "tokenizer" and "sampling"."""
    kept = {k: v for k, v in values.items() if k != "family"}
    return TransformerConfig(**(kept | {"grid": (kept["grid"][0], kept["grid"][1])}))


def split(weights: dict[str, Tensor], limit: int = SHARD_BYTES) -> list[dict[str, Tensor]]:
    """Shards of at most `limit` bytes in the order of the weights."""
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, value in weights.items():
        if used + value.nbytes > limit:
            shards.append({})
            used = 0
        shards[-1][name] = value
        used += value.nbytes
    return shards


def disturb(packed: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """fp32 weights whose rounded ones are off by up to half a step more."""
    disturbed = dict(packed)
    for name in (name for name in packed if f"{name}.scale" in packed):
        value = packed[name].float()
        disturbed[name] = value + torch.rand(value.shape, generator=generator) - 0.5
    return dequantize(disturbed)


def _expand(packed: dict[str, Tensor], name: str) -> Tensor:
    value = packed[name].float()
    if f"{name}.scale" not in packed:
        return value
    return value * packed[f"{name}.scale"].float().view(-1, *[1] * (value.ndim - 1))


def _fill(module: nn.Module, packed: dict[str, Tensor], noise: torch.Generator | None) -> None:
    module.load_state_dict(dequantize(packed) if noise is None else disturb(packed, noise))
