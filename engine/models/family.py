"""`DecoderModel`: what the published families share, from loading to pixels."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn

from engine.checkpoint import Checkpoint, LayerTensors, Param, Source, random_tensors
from engine.models.base import ModelShape, SubBatchRun, VisualModel
from engine.models.decoder import (
    Decoder,
    DecoderConfig,
    Projection,
    norm_param,
    rotary_angles,
    rotary_frequencies,
)
from engine.models.options import LoadOptions
from engine.models.pixels import Pixels
from engine.models.text import FileTokenizer, TextTokenizer, WordHash, special_token
from engine.weights import WeightError, load_json
from scheduler.request import Sampling
from sparse_attn.geometry import Grid


@dataclass(frozen=True)
class FamilyConfig:
    """What every family's config.json comes to.

    vocabulary: rows of the embedding table of text (and, in most families, image) tokens.
    image_ids: id of every visual token in that table, in the order of the code book; empty where
        the image has tables of its own.
    row_id: id of the end-of-row token in that table, or None.
    theta, rope_factor: of the rotary positions; the factor divides positions ("linear" scaling).
    factor: pixels per side of a visual token.
    sizes: (width, height) in pixels, the default first.
    prompt_tokens: most prompt tokens unless the user says otherwise.
    """

    decoder: DecoderConfig
    vocabulary: int
    image_vocab: int
    image_ids: tuple[int, ...]
    row_id: int | None
    theta: float
    factor: int
    sizes: tuple[tuple[int, int], ...]
    sampling: Sampling
    tied: bool = False
    rope_factor: float = 1.0
    prompt_tokens: int = 256
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.image_ids and len(self.image_ids) != self.image_vocab:
            raise WeightError(
                f"the vocabulary has {len(self.image_ids)} image tokens, the pixel decoder "
                f"{self.image_vocab}"
            )


class DecoderModel(VisualModel):
    """A family on the shared decoder. A subclass says what its config.json means, what its
    checkpoint calls things, and how a prompt is written."""

    family: ClassVar[str]
    title: ClassVar[str]
    architectures: ClassVar[tuple[str, ...]]
    """Values of `architectures` in config.json that mean this family."""
    renames: ClassVar[Sequence[tuple[str, str]]] = ()
    """Rules that turn the names of older or original checkpoints into those of `parameters`."""
    special_tokens: ClassVar[Mapping[str, str]] = {}
    """Tokens a prompt needs: key in tokenizer_config.json, and the token if that is silent."""
    unused: ClassVar[Sequence[str]] = ()
    """Tensors a checkpoint may hold that drawing does not need (image input), by expression."""

    def __init__(
        self,
        name: str,
        config: FamilyConfig,
        tensors: dict[str, Tensor],
        text: TextTokenizer,
        special: Mapping[str, int],
        options: LoadOptions,
    ) -> None:
        self.name, self.config, self.options = name, config, options
        self.text, self.special = text, special
        c = config.decoder
        prompt = options.prompt_tokens or config.prompt_tokens
        c.split.check(options.shard.size)
        whole = ModelShape(
            c.layers, c.dim, c.q_heads, c.kv_heads, c.head_dim, config.image_vocab, prompt
        )
        self.shape = options.shard.heads(whole)
        self.sizes, self.sampling = config.sizes, config.sampling
        self.prompt_limit = f"{prompt} tokens, the template included"
        self._decoder = Decoder(c, tensors, options.backend, options.shard, options.keep)
        self._norm = tensors["norm.weight"]
        self._take_tables(tensors)
        self._take_pixels(tensors)
        self._take_rotary()

    # Loading

    @classmethod
    @abstractmethod
    def configure(cls, values: Mapping[str, Any], folder: Path | None) -> FamilyConfig:
        """What config.json says. `folder` is None for random weights. Raises WeightError."""

    @classmethod
    def parameters(cls, config: FamilyConfig) -> list[Param]:
        """Every tensor the model keeps, and where a checkpoint has it."""
        raise NotImplementedError

    @classmethod
    def dummy_text(cls, config: FamilyConfig) -> TextTokenizer:
        """A tokenizer for random weights; special tokens take the last ids that are free."""
        taken = {*config.image_ids, config.row_id}
        free = (i for i in reversed(range(config.vocabulary)) if i not in taken)
        special = dict(zip(cls.special_tokens.values(), free, strict=False))
        return WordHash(config.vocabulary, special, taken)

    @classmethod
    def checkpoint(cls, folder: Path, config: FamilyConfig) -> Checkpoint:
        """The tensors of a folder under the names of `parameters`."""
        return Checkpoint.of_folder(folder).renamed(cls.renames)

    @classmethod
    def tokenizer(cls, folder: Path, config: FamilyConfig) -> TextTokenizer:
        return FileTokenizer.of_folder(folder)

    @classmethod
    def tokens(cls, folder: Path, config: FamilyConfig) -> tuple[TextTokenizer, dict[str, int]]:
        """The tokenizer, and the ids of the special tokens. Raises WeightError."""
        text = cls.tokenizer(folder, config)
        special = {
            key: text.id_of(special_token(folder, key, token))
            for key, token in cls.special_tokens.items()
        }
        return text, special

    @classmethod
    def load(cls, name: str, folder: Path, options: LoadOptions) -> Self:
        """From a folder in Hugging Face's layout.

        Everything that can be wrong with the files is found before memory is taken: WeightError
        names the file, tensor or key. ValueError for options the family cannot serve.
        """
        config = cls.configure(load_json(folder / "config.json"), folder)
        if options.dummy:
            return cls.dummy(name, config, options)
        config.decoder.split.check(options.shard.size)
        params = cls.parameters(config)
        text, special = cls.tokens(folder, config)
        checkpoint = cls.checkpoint(folder, config)
        checkpoint.check(params, cls.unused)
        params = options.shard.params(params, config.decoder.split)
        if options.keep is None:
            tensors = checkpoint.load(params, options.dtype, options.device, options.progress)
        else:
            tensors = LayerTensors(
                params,
                lambda some: checkpoint.load(some, options.dtype, options.device, ahead=False),
            )
        return cls(name, config, tensors, text, special, options)

    @classmethod
    def dummy(cls, name: str, config: FamilyConfig, options: LoadOptions) -> Self:
        """Random weights in the geometry of a config (`load_format: dummy`)."""
        split = config.decoder.split
        split.check(options.shard.size)
        tensors = LayerTensors(
            cls.parameters(config),
            lambda some: options.shard.tensors(
                random_tensors(some, options.dtype, options.device), split
            ),
        )
        text = cls.dummy_text(config)
        special = {key: text.id_of(token) for key, token in cls.special_tokens.items()}
        return cls(name, config, tensors, text, special, options)

    # Tables, overridden where an image has tables of its own

    def _take_tables(self, w: dict[str, Tensor]) -> None:
        self._embed = w["embed.weight"]
        ids = [*self.config.image_ids]
        if self.config.row_id is not None:
            ids.append(self.config.row_id)
        self._visual_ids = torch.tensor(ids, dtype=torch.int64, device=self._embed.device)
        self._head = Projection(w.pop("head.weight"), w.get("head.bias"), self.options.backend)

    def _take_pixels(self, w: dict[str, Tensor]) -> None:
        module = self.pixel_module()
        self.pixels = None if module is None else self._filled(module, w)

    def _filled(self, module: nn.Module, w: dict[str, Tensor]) -> Pixels:
        held = {k.removeprefix("vq."): t for k, t in w.items() if k.startswith("vq.")}
        module.load_state_dict(held, strict=True, assign=True)
        return Pixels(module, self.options.pixel_memory, *self.pixel_range())

    def pixel_module(self) -> nn.Module | None:
        """The pixel decoder on the meta device, ready for its weights; None if it has none."""
        return None

    def pixel_range(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and deviation by which the decoder's output becomes colours in 0..1."""
        return (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)

    # Positions: one-dimensional, counted from the start of the prompt, unless overridden

    def _take_rotary(self) -> None:
        longest = self.shape.prompt + max(self.grid_of(size).tokens for size in self.sizes)
        device = self._embed.device
        frequencies = rotary_frequencies(self.config.theta, self.shape.head_dim, device)
        positions = torch.arange(longest, device=device) / self.config.rope_factor
        self._cos, self._sin = rotary_angles(positions, frequencies)

    def rotary_prompt(self, count: int) -> tuple[Tensor, Tensor]:
        return self._cos[:count], self._sin[:count]

    def rotary_visual(
        self, positions: Int64[Tensor, "M"], prompts: Int64[Tensor, "M"], grid: Grid
    ) -> tuple[Tensor, Tensor]:
        at = positions + prompts
        return self._cos[at], self._sin[at]

    # The engine's side

    def grid_of(self, size: tuple[int, int]) -> Grid:
        if size not in self.sizes:
            raise self._refuse_size(size)
        width, height = size
        rows = int(self.config.row_id is not None)
        return Grid(height // self.config.factor, width // self.config.factor, rows)

    def embed_prompt(self, tokens: Int64[Tensor, "P"]) -> Float[Tensor, "P d"]:
        return self._embed[tokens]

    def embed_visual(
        self, tokens: Int64[Tensor, "M"], positions: Int64[Tensor, "M"], grid: Grid
    ) -> Float[Tensor, "M d"]:
        return self._embed[self._visual_ids[tokens]]

    def run_layer(self, layer: int, run: SubBatchRun) -> None:
        self._decoder.run_layer(layer, run)

    def layer_weights(self, layer: int) -> object:
        return self._decoder.layer(layer)

    def logits(self, hidden: Float[Tensor, "M d"]) -> Float[Tensor, "M V"]:
        return self._head(self._decoder.normed(hidden, self._norm)).float()

    def picture_tokens(self, tokens: Int64[Tensor, "B N"], grid: Grid) -> Int64[Tensor, "B H W"]:
        """The visual tokens of a picture, end-of-row tokens left out."""
        return tokens.view(len(tokens), grid.height, grid.stride)[:, :, : grid.width]

    def decode_pixels(
        self, tokens: Int64[Tensor, "B N"], grid: Grid
    ) -> UInt8[Tensor, "B height width 3"]:
        if self.pixels is None:
            raise RuntimeError(f"model {self.name!r} has no pixel decoder")
        return self.pixels.pictures(self.picture_tokens(tokens, grid))

    def _fitting(self, ids: Sequence[int], prompt: str) -> tuple[int, ...]:
        """The ids, if a sequence has room for them and the prompt's words are words.

        A prompt that spells out a token by which the model marks an image would break the marks.
        """
        self._refuse_marks(prompt)
        if len(ids) > self.shape.prompt:
            raise ValueError(
                f"the prompt has {len(ids)} tokens with its template; {self.name!r} takes at most "
                f"{self.shape.prompt}: shorten it, or load the model with more prompt_tokens"
            )
        return tuple(ids)

    def _refuse_marks(self, prompt: str) -> None:
        ids = self.text.encode(prompt)
        for key, mark in self.special.items():
            if mark in ids:
                raise ValueError(f"the prompt spells out the model's {key}; leave that out")
        if self._marks.intersection(ids):
            raise ValueError("the prompt spells out image tokens; leave them out")

    @cached_property
    def _marks(self) -> frozenset[int | None]:
        return frozenset((*self.config.image_ids, self.config.row_id))


def table_params(c: FamilyConfig, embed: str, head: str, norm: str) -> list[Param]:
    """Embedding table, final norm, and the head's rows of the image vocabulary alone."""
    table = (Source(f"{embed}.weight", (c.vocabulary, c.decoder.dim)),)
    rows = table if c.tied else (Source(f"{head}.weight", (c.vocabulary, c.decoder.dim)),)
    return [
        Param("embed.weight", table, spread=c.decoder.dim**0.5),
        norm_param("norm", norm, c.decoder),
        Param("head.weight", rows, rows=c.image_ids),
    ]
