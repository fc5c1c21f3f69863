"""`mini`: the bundled text-to-image model, a Llama-like decoder with 2-D rotary positions.

RMSNorm, SwiGLU, QK norm, tied head. The prompt is 32 word positions and one begin-of-image token;
the input of a position also carries the row and column of the token it predicts.
"""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from engine import weights
from engine.layers import Linear, rms_norm, rotated_heads, swiglu
from engine.models.base import ModelShape, SubBatchRun, VisualModel
from engine.models.mini_text import WordTokenizer
from engine.models.mini_vq import FSQTokenizer, FSQTokenizerConfig
from engine.parallel.shard import WHOLE, Shard, Split
from engine.weights import Weight, WeightError
from scheduler.request import Sampling
from sparse_attn.attention import Backend
from sparse_attn.geometry import Grid


@dataclass(frozen=True)
class MiniConfig:
    """config.json of the family."""

    grid: tuple[int, int] = (24, 24)
    dim: int = 384
    layers: int = 12
    heads: int = 6
    head_dim: int = 64
    ffn: int = 1024
    image_vocab: int = 4096
    text_vocab: int = 841
    text_len: int = 32
    rope_theta: float = 100.0
    norm_eps: float = 1e-6
    tokenizer: FSQTokenizerConfig = field(default_factory=FSQTokenizerConfig)
    sampling: Sampling = Sampling(guidance_scale=4.0, top_p=0.9)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "MiniConfig":
        """Raises WeightError on unknown keys."""
        values = {k: v for k, v in values.items() if k != "family"}
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown:
            raise WeightError(f"config of family 'mini' does not know the key {unknown[0]!r}")
        if "grid" in values:
            values["grid"] = tuple(values["grid"])
        if "tokenizer" in values:
            values["tokenizer"] = FSQTokenizerConfig.from_dict(values["tokenizer"])
        if "sampling" in values:
            values["sampling"] = Sampling(**values["sampling"])
        return cls(**values)

    @property
    def prompt(self) -> int:
        """Prompt positions: the words and begin-of-image."""
        return self.text_len + 1


def transformer_shapes(c: MiniConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the transformer."""
    height, width = c.grid
    inner = c.heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed.text.weight": (c.text_vocab, c.dim),
        "embed.text_position": (c.text_len, c.dim),
        "embed.image.weight": (c.image_vocab, c.dim),
        "embed.begin_image": (c.dim,),
        "embed.row": (height, c.dim),
        "embed.column": (width, c.dim),
        "norm.weight": (c.dim,),
    }
    for i in range(c.layers):
        shapes |= {
            f"layers.{i}.attn_norm.weight": (c.dim,),
            f"layers.{i}.qkv.weight": (3 * inner, c.dim),
            f"layers.{i}.q_norm.weight": (c.head_dim,),
            f"layers.{i}.k_norm.weight": (c.head_dim,),
            f"layers.{i}.out.weight": (c.dim, inner),
            f"layers.{i}.mlp_norm.weight": (c.dim,),
            f"layers.{i}.gate_up.weight": (2 * c.ffn, c.dim),
            f"layers.{i}.down.weight": (c.dim, c.ffn),
        }
    return shapes


def random_weights(c: MiniConfig, seed: int = 0) -> dict[str, Weight]:
    """Random weights of the right shapes, for tests and soaks (`load_format: dummy`)."""
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for name, shape in transformer_shapes(c).items():
        norm = name.endswith("norm.weight")
        noise = torch.randn(shape, generator=generator)
        result[name] = Weight(1 + 0.1 * noise if norm else noise * shape[-1] ** -0.5)
    return result


def cut_weights(tensors: dict[str, Weight], c: MiniConfig, shard: Shard) -> dict[str, Weight]:
    """This shard's part of the weights. Raises ValueError if they cannot be divided so."""
    split = Split(c.heads, c.heads, c.head_dim, c.ffn)
    split.check(shard.size)
    data = shard.tensors({name: w.data for name, w in tensors.items()}, split)
    return {name: Weight(part, _scale(tensors[name], name, split, shard))
            for name, part in data.items()}  # fmt: skip


def _scale(weight: Weight, name: str, split: Split, shard: Shard) -> Tensor | None:
    """The scales of the rows that stay."""
    cut = shard.cut(name, tuple(weight.data.shape), split)
    if weight.scale is None or cut is None or cut.rows is None:
        return weight.scale
    return cut.of(weight.scale)


class _Layer:
    """The weights of one transformer layer, on a backend."""

    def __init__(self, w: dict[str, Weight], index: int, backend: Backend) -> None:
        def take(name: str) -> Weight:
            return w[f"layers.{index}.{name}.weight"]

        def linear(name: str) -> Linear:
            weight = take(name)
            scale = None if weight.scale is None else weight.scale.float()
            return Linear(weight.data, scale, backend)

        self.attn_norm, self.mlp_norm = take("attn_norm").float(), take("mlp_norm").float()
        self.q_norm, self.k_norm = take("q_norm").float(), take("k_norm").float()
        self.qkv, self.out = linear("qkv"), linear("out")
        self.gate_up, self.down = linear("gate_up"), linear("down")


class Mini(VisualModel):
    """The decoder, its word tokenizer and its pixel decoder. fp32 on the CPU."""

    prompt_limit = "30 words"

    def __init__(
        self,
        name: str,
        config: MiniConfig,
        tensors: dict[str, Weight],
        words: WordTokenizer,
        pixels: FSQTokenizer,
        backend: Backend,
        shard: Shard = WHOLE,
    ) -> None:
        """tensors: of the whole model."""
        self.name, self.config, self.backend, self._shard = name, config, backend, shard
        tensors = cut_weights(tensors, config, shard)
        self.words, self.pixels = words, pixels.eval()
        whole = ModelShape(
            config.layers, config.dim, config.heads, config.heads, config.head_dim,
            config.image_vocab, config.prompt,
        )  # fmt: skip
        self.shape = shard.heads(whole)
        height, width = config.grid
        self.sizes = ((width * config.tokenizer.factor, height * config.tokenizer.factor),)
        self.sampling = config.sampling
        self._layers = [_Layer(tensors, i, backend) for i in range(config.layers)]
        self._take_embeddings(tensors)
        self._cos, self._sin = rotary_table(config)

    @classmethod
    def load(cls, name: str, folder: Path, backend: Backend, shard: Shard = WHOLE) -> "Mini":
        """From a folder with config.json, vocab.json and safetensors. Raises WeightError."""
        config = MiniConfig.from_dict(weights.load_json(folder / "config.json"))
        tensors = weights.load(weights.shards(folder, "transformer"), transformer_shapes(config))
        try:
            words = WordTokenizer.from_file(folder / "vocab.json")
        except (OSError, ValueError) as error:
            raise WeightError(f"cannot read the vocabulary in {folder}: {error}") from error
        if len(words.words) != config.text_vocab:
            raise WeightError(
                f"vocab.json has {len(words.words)} words, config.json says {config.text_vocab}"
            )
        return cls(name, config, tensors, words, _load_pixels(config, folder), backend, shard)

    @classmethod
    def dummy(cls, name: str, config: MiniConfig, backend: Backend, shard: Shard = WHOLE) -> "Mini":
        """Random weights; the words are the special ones and a few to type."""
        fill = [f"word{i}" for i in range(config.text_vocab - 4)]
        words = WordTokenizer(["<pad>", "<bos>", "<eos>", "<unk>", *fill])
        with torch.random.fork_rng():
            torch.manual_seed(0)
            pixels = FSQTokenizer(config.tokenizer)
        return cls(name, config, random_weights(config), words, pixels, backend, shard)

    def _take_embeddings(self, w: dict[str, Weight]) -> None:
        table = w["embed.image.weight"]
        scale = None if table.scale is None else table.scale.float()
        self._head = Linear(table.data, scale, self.backend)
        self._image = table.float()
        self._text = w["embed.text.weight"].float()
        self._text_position = w["embed.text_position"].float()
        self._begin = w["embed.begin_image"].float()
        row, column = w["embed.row"].float(), w["embed.column"].float()
        self._target = (row[:, None] + column[None]).flatten(0, 1)
        self._norm = w["norm.weight"].float()

    def grid_of(self, size: tuple[int, int]) -> Grid:
        if size not in self.sizes:
            raise self._refuse_size(size)
        return Grid(*self.config.grid)

    def encode_prompt(self, prompt: str, grid: Grid) -> tuple[int, ...]:
        return (*self.words.encode(prompt), self._begin_image)

    def unconditional_prompt(self, conditional: tuple[int, ...], grid: Grid) -> tuple[int, ...]:
        return (0,) * self.config.text_len + (self._begin_image,)

    @property
    def _begin_image(self) -> int:
        """Id behind the words, which only the engine uses."""
        return self.config.text_vocab

    def embed_prompt(self, tokens: Int64[Tensor, "P"]) -> Float[Tensor, "P d"]:
        words = self._text[tokens[:-1]] + self._text_position
        return torch.cat([words, (self._begin + self._target[0])[None]])

    def embed_visual(
        self, tokens: Int64[Tensor, "M"], positions: Int64[Tensor, "M"], grid: Grid
    ) -> Float[Tensor, "M d"]:
        target = (positions + 1).clamp_max(grid.tokens - 1)
        return self._image[tokens] + self._target[target]

    def rotary_prompt(self, count: int) -> tuple[Tensor, Tensor]:
        return self._cos[:count], self._sin[:count]

    def rotary_visual(
        self, positions: Int64[Tensor, "M"], prompts: Int64[Tensor, "M"], grid: Grid
    ) -> tuple[Tensor, Tensor]:
        at = positions + self.config.prompt
        return self._cos[at], self._sin[at]

    def run_layer(self, layer: int, run: SubBatchRun) -> None:
        w, eps = self._layers[layer], self.config.norm_eps
        qkv = w.qkv(rms_norm(run.hidden, w.attn_norm, eps, self.backend))
        heads, norms = (self.shape.kv_heads,) * 2, (w.q_norm, w.k_norm)
        q, k, v = rotated_heads(qkv, norms, run.cos, run.sin, heads, eps, self.backend)
        attended = run.attention(layer, q, k, v)
        run.hidden = run.hidden + self._shard.sum(w.out(attended.flatten(1)))
        gate_up = w.gate_up(rms_norm(run.hidden, w.mlp_norm, eps, self.backend))
        run.hidden = run.hidden + self._shard.sum(w.down(swiglu(gate_up, self.backend)))

    def layer_weights(self, layer: int) -> object:
        return self._layers[layer]

    def logits(self, hidden: Float[Tensor, "M d"]) -> Float[Tensor, "M V"]:
        return self._head(rms_norm(hidden, self._norm, self.config.norm_eps, self.backend))

    def decode_pixels(
        self, tokens: Int64[Tensor, "B N"], grid: Grid
    ) -> UInt8[Tensor, "B height width 3"]:
        with torch.inference_mode():
            pixels = self.pixels.decode(tokens, grid.height, grid.width)
        return (pixels * 255).round().to(torch.uint8).permute(0, 2, 3, 1)


def rotary_table(c: MiniConfig) -> tuple[Tensor, Tensor]:
    """cos and sin [prompt + N, head_dim / 2]: row angles first, then column angles.

    Word i sits at (-2, i), begin-of-image at (-1, -1), visual token t at (row, column).
    """
    height, width = c.grid
    t = torch.arange(height * width)
    row = torch.cat([torch.full((c.text_len,), -2), torch.tensor([-1]), t // width]).float()
    column = torch.cat([torch.arange(c.text_len), torch.tensor([-1]), t % width]).float()
    quarter = c.head_dim // 4
    frequency = c.rope_theta ** (-torch.arange(quarter) / quarter)
    angles = torch.cat([row[:, None] * frequency, column[:, None] * frequency], 1)
    return angles.cos(), angles.sin()


def _load_pixels(config: MiniConfig, folder: Path) -> FSQTokenizer:
    pixels = FSQTokenizer(config.tokenizer)
    shapes = {name: tuple(t.shape) for name, t in pixels.state_dict().items()}
    tensors = weights.load(weights.shards(folder, "tokenizer"), shapes)
    pixels.load_state_dict({name: w.float() for name, w in tensors.items()})
    return pixels
