"""The sizes of a model that the planner needs; nothing is loaded to find them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from engine import weights
from engine.models.catalog import default_grid
from engine.models.family import DecoderModel
from engine.models.mini import MiniConfig, transformer_shapes
from engine.models.options import DTYPES
from engine.models.presets import ModelError, find_folder, presets
from engine.models.registry import PUBLISHED, family_of
from engine.weights import load_json
from sparse_attn.geometry import Grid


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """A decoder in numbers.

    layer_numbers, layer_bytes: weights of one layer. head_bytes: of what turns hidden states into
    logits. other_bytes: of tables and the pixel decoder, which stay where the model computes.
    prompt: tokens of prompt that a sequence has room for. sequences: of an image (2 with guidance).
    """

    name: str
    layers: int
    dim: int
    kv_heads: int
    q_heads: int
    head_dim: int
    prompt: int
    grid: Grid
    sequences: int
    layer_numbers: int
    layer_bytes: int
    head_numbers: int
    head_bytes: int
    other_bytes: int

    @property
    def weight_bytes(self) -> int:
        return self.layers * self.layer_bytes + self.head_bytes + self.other_bytes


def geometry_of(model: str, dtype: str) -> ModelGeometry:
    """Of a preset, folder or hub id. Raises ModelError or WeightError."""
    known = presets().get(model)
    if known is not None and known.folder is None:
        values, folder = dict(known.config), None
        family = known.family
    else:
        folder = (known.folder if known else None) or find_folder(model)
        values = load_json(folder / "config.json")
        family = known.family if known else family_of(values)
    if family == "mini":
        return _mini(model, MiniConfig.from_dict(values), known is not None and known.dummy)
    if dtype not in DTYPES:
        raise ModelError(f"unknown dtype {dtype!r} (known: {', '.join(DTYPES)})")
    return _published(model, PUBLISHED[family], values, folder, DTYPES[dtype])


def _published(
    name: str, cls: type[DecoderModel], values: Mapping[str, Any], folder: Path | None,
    dtype: torch.dtype,
) -> ModelGeometry:  # fmt: skip
    config = cls.configure(values, folder)
    params, c = cls.parameters(config), config.decoder
    sizes = {p.name: (torch.Size(p.shape).numel(), p.bytes(dtype)) for p in params}
    layer = [s for n, s in sizes.items() if n.startswith("layers.0.")]
    head = [s for n, s in sizes.items() if n.startswith("head")]
    layer_bytes, head_bytes = sum(b for _, b in layer), sum(b for _, b in head)
    return ModelGeometry(
        name, c.layers, c.dim, c.kv_heads, c.q_heads, c.head_dim, config.prompt_tokens,
        default_grid(config), 2 if config.sampling.guided else 1,
        sum(n for n, _ in layer), layer_bytes, sum(n for n, _ in head), head_bytes,
        sum(b for _, b in sizes.values()) - c.layers * layer_bytes - head_bytes,
    )  # fmt: skip


def _mini(name: str, c: MiniConfig, dummy: bool) -> ModelGeometry:
    shapes = transformer_shapes(c)
    count = {n: torch.Size(s).numel() for n, s in shapes.items()}
    size = {n: 4 * k for n, k in count.items()} if dummy else _stored(name)
    layer = [n for n in count if n.startswith("layers.0.")]
    layer_bytes = sum(b for n, b in size.items() if n.startswith("layers.0."))
    head = "embed.image.weight"
    other = sum(b for n, b in size.items() if not n.startswith("layers."))
    return ModelGeometry(
        name, c.layers, c.dim, c.heads, c.heads, c.head_dim, c.prompt, Grid(*c.grid),
        2 if c.sampling.guided else 1, sum(count[n] for n in layer), layer_bytes, count[head],
        sum(b for n, b in size.items() if n.startswith(head)),
        other + 4 * count[head],
    )  # fmt: skip


def _stored(model: str) -> dict[str, int]:
    """Bytes of every tensor of the transformer, from the headers of its files."""
    known = presets().get(model)
    folder = (known.folder if known else None) or find_folder(model)
    found = {}
    for file in weights.shards(folder, "transformer"):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                part = opened.get_slice(name)
                width = 1 if part.get_dtype() == "I8" else 4
                found[name] = torch.Size(part.get_shape()).numel() * width
    return found
