"""LlamaGen (Sun et al. 2024): class to image and text to image, with 2-D rotary positions.

A folder comes from the published files through `engine.models.llamagen_files.convert`. The prompt's
queries and keys are rotated by zeros, that is, they are zero: every token reads the mean of the
prompt's values. So a prompt needs no positions, and the padding in front of a caption, which the
original masks away, can be left out.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from engine.checkpoint import Param, Source
from engine.models.caption import Caption, DummyCaption, T5Caption
from engine.models.decoder import (
    LayerNames,
    Projection,
    activate,
    layer_params,
    norm_param,
    rotary_angles,
    rotary_frequencies,
)
from engine.models.family import DecoderModel, FamilyConfig
from engine.models.hf_config import Values
from engine.models.text import TextTokenizer, WordHash
from engine.models.vqgan import VQGANConfig, VQGANDecoder, vqgan_params
from engine.weights import WeightError
from scheduler.request import Sampling
from sparse_attn.geometry import Grid

NAMES = LayerNames(
    attn_norm="layers.{i}.attention_norm",
    mlp_norm="layers.{i}.ffn_norm",
    qkv=("layers.{i}.attention.wqkv",),
    out="layers.{i}.attention.wo",
    gate_up=("layers.{i}.feed_forward.w1", "layers.{i}.feed_forward.w3"),
    down="layers.{i}.feed_forward.w2",
)
DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": None, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": 16384,
    "num_classes": 1000, "caption_dim": 2048, "caption_tokens": 120, "code_dim": 8,
    "base_channels": 128, "latent_channels": 256, "channel_multiplier": (1, 1, 2, 2, 4),
    "num_res_blocks": 2, "hidden_act": "silu",
}  # fmt: skip


class LlamaGen(DecoderModel):
    """Prompt: one class, or the tokens of a caption as T5 encodes them. Unconditional prompt: the
    class behind the last one, or as many learnt vectors as the caption has tokens."""

    family = "llamagen"
    title = "LlamaGen"
    architectures = ("LlamaGen",)
    unused = (r"vq\.(encoder|quant_conv)\.", r"vq\.quantize\.codebook_used$")

    caption: Caption

    @classmethod
    def configure(cls, values: Mapping[str, Any], folder: Path | None) -> FamilyConfig:
        text = Values(values, DEFAULTS, "config.json")
        mode = text.get("mode")
        if mode not in ("c2i", "t2i"):
            raise WeightError(f"config.json: mode must be 'c2i' or 't2i', got {mode!r}")
        pixels = VQGANConfig(
            codes=text.count("vocab_size"),
            code_dim=text.count("code_dim"),
            latent_channels=text.count("latent_channels"),
            base_channels=text.count("base_channels"),
            channel_multiplier=text.numbers("channel_multiplier"),
            res_blocks=text.count("num_res_blocks"),
        )
        side, classes = text.count("image_size"), mode == "c2i"
        return FamilyConfig(
            decoder=text.decoder(),
            vocabulary=text.count("num_classes") + 1 if classes else text.count("caption_dim"),
            image_vocab=pixels.codes,
            image_ids=(),
            row_id=None,
            theta=text.number("rope_theta"),
            factor=pixels.factor,
            sizes=((side, side),),
            sampling=Sampling(4.0, top_k=2000) if classes else Sampling(7.5, top_k=1000),
            prompt_tokens=1 if classes else text.count("caption_tokens"),
            extra={"mode": mode, "pixels": pixels, "folder": folder},
        )

    @classmethod
    def parameters(cls, config: FamilyConfig) -> list[Param]:
        c, codes = config.decoder, config.image_vocab
        table = (Source("tok_embeddings.weight", (codes, c.dim)),)
        head = (Source("output.weight", (codes, c.dim)),)
        return [
            Param("embed.weight", table, spread=c.dim**0.5),
            Param("head.weight", head),
            norm_param("norm", "norm", c),
            *_condition_params(config),
            *layer_params(c, NAMES, (lambda w: half_split(w, c.qkv_rows, c.head_dim),)),
            *vqgan_params(config.extra["pixels"], "llamagen", "vq."),
        ]

    @classmethod
    def tokenizer(cls, folder: Path, config: FamilyConfig) -> TextTokenizer:
        """Captions are T5's business; checked here so that a missing encoder is found first."""
        if config.extra["mode"] == "t2i":
            T5Caption.check(folder / "t5", config.vocabulary)
        return WordHash(1, {})

    @classmethod
    def dummy_text(cls, config: FamilyConfig) -> TextTokenizer:
        return WordHash(1, {})

    def _take_tables(self, w: dict[str, Tensor]) -> None:
        backend, folder = self.options.backend, self.config.extra["folder"]
        if self.options.prompt_tokens is not None:
            raise ValueError("the prompt of LlamaGen has a length of its own: leave prompt_tokens")
        self._embed = w["embed.weight"]
        self._head = Projection(w.pop("head.weight"), None, backend)
        if self.classes:
            self._classes = w["classes.weight"]
            return
        self._unconditional = w["unconditional.weight"]
        self._caption = [Projection(w.pop(f"caption.{i}.weight"), None, backend) for i in (0, 1)]
        dummy = self.options.dummy or folder is None
        options, width = self.options, self.config.vocabulary
        self.caption = DummyCaption(width) if dummy else T5Caption(folder / "t5", options)

    @property
    def classes(self) -> bool:
        """Whether a prompt is a class rather than a caption."""
        return bool(self.config.extra["mode"] == "c2i")

    def pixel_module(self) -> nn.Module:
        with torch.device("meta"):
            return VQGANDecoder(self.config.extra["pixels"])

    def encode_prompt(self, prompt: str, grid: Grid) -> tuple[int, ...]:
        if self.classes:
            return (self._class(prompt),)
        return self._fitting(self.caption.encode(prompt), prompt)

    def _class(self, prompt: str) -> int:
        last = self.config.vocabulary - 2
        word = prompt.strip().removeprefix("class").strip()
        if not word.isdecimal() or int(word) > last:
            raise ValueError(
                f"{self.name!r} draws classes, not texts: give a class number in 0..{last}, not "
                f"{prompt[:40]!r}"
            )
        return int(word)

    def unconditional_prompt(self, conditional: tuple[int, ...], grid: Grid) -> tuple[int, ...]:
        if self.classes:
            return (self.config.vocabulary - 1,)
        first = self.caption.size + self.shape.prompt - len(conditional)
        return tuple(range(first, first + len(conditional)))

    def embed_prompt(self, tokens: Int64[Tensor, "P"]) -> Float[Tensor, "P d"]:
        if self.classes:
            return self._classes[tokens]
        learnt = int(tokens[0]) >= self.caption.size
        rows = self._unconditional[tokens - self.caption.size] if learnt else self._read(tokens)
        return self._caption[1](activate(self._caption[0](rows), "gelu_tanh"))

    def _read(self, tokens: Int64[Tensor, "P"]) -> Float[Tensor, "P e"]:
        return self.caption.read(tokens).to(self._unconditional)

    def embed_visual(
        self, tokens: Int64[Tensor, "M"], positions: Int64[Tensor, "M"], grid: Grid
    ) -> Float[Tensor, "M d"]:
        return self._embed[tokens]

    def _take_rotary(self) -> None:
        """Row angles in the first half of the pairs, column angles in the second."""
        grid, half = self.grid, self.shape.head_dim // 2
        frequencies = rotary_frequencies(self.config.theta, half, self._embed.device)
        t = torch.arange(grid.tokens, device=self._embed.device)
        row = rotary_angles(t // grid.width, frequencies)
        column = rotary_angles(t % grid.width, frequencies)
        self._cos, self._sin = (torch.cat([r, c], 1) for r, c in zip(row, column, strict=True))

    def rotary_prompt(self, count: int) -> tuple[Tensor, Tensor]:
        zero = self._cos.new_zeros(count, self._cos.shape[1])
        return zero, zero

    def rotary_visual(
        self, positions: Int64[Tensor, "M"], prompts: Int64[Tensor, "M"], grid: Grid
    ) -> tuple[Tensor, Tensor]:
        return self._cos[positions], self._sin[positions]


def half_split(qkv: Tensor, rows: tuple[int, int, int], head_dim: int) -> Tensor:
    """Rows of q and k reordered within every head, so that rotary pairs (2i, 2i + 1) become
    (i, i + D/2). Scores do not change."""
    q, k, v = qkv.split(rows)
    turned = [x.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2) for x in (q, k)]
    return torch.cat([*turned, v])


def _condition_params(config: FamilyConfig) -> list[Param]:
    dim, e = config.decoder.dim, config.extra
    if e["mode"] == "c2i":
        table = (Source("cls_embedding.embedding_table.weight", (config.vocabulary, dim)),)
        return [Param("classes.weight", table, spread=dim**0.5)]
    inputs = config.vocabulary
    learnt = (Source("cls_embedding.uncond_embedding", (config.prompt_tokens, inputs)),)
    first = (Source("cls_embedding.cap_proj.fc1.weight", (dim, inputs)),)
    second = (Source("cls_embedding.cap_proj.fc2.weight", (dim, dim)),)
    return [
        Param("unconditional.weight", learnt),
        Param("caption.0.weight", first),
        Param("caption.1.weight", second),
    ]
