"""GLM-Image's autoregressive stage (Z.ai 2026): GLM-4's layers with three-axis rotary positions.

It draws a small preview, then the picture's tokens, one per 32 x 32 pixels. A diffusion decoder of
its own turns those into pixels; it is no part of this engine, so that what comes out here are the
tokens, and the picture that is sent shows them as colours.

The preview's tokens come first in the sequence and are counted into the rows of the grid where they
fill whole rows of it (all squares whose side is 16, 32 or 64 tokens); other sizes have one row
alone, and policies that go by rows see them as a line.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from engine.checkpoint import Param, Source
from engine.models.decoder import (
    LayerNames,
    layer_params,
    norm_param,
    rotary_angles,
    rotary_frequencies,
)
from engine.models.family import DecoderModel, FamilyConfig
from engine.models.hf_config import LLAMA, Values
from engine.models.pixels import Pixels, TokenColours
from engine.weights import WeightError, load_json
from scheduler.request import Sampling
from sparse_attn.geometry import Grid

CELL, PREVIEW = 32, 16
"""Pixels per token, and the side of a square preview in tokens."""
SIZES = (
    (1024, 1024), (512, 512), (2048, 2048), (768, 1152), (1152, 768), (1152, 896), (896, 1152),
    (1280, 960), (960, 1280), (1728, 960), (960, 1728),
)  # fmt: skip
DEFAULTS = LLAMA | {
    "vocab_size": 168064, "intermediate_size": 13696, "num_hidden_layers": 40,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "attention_bias": True,
    "vision_vocab_size": 16512,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stages:
    """The two pictures of a sequence, in tokens: (height, width) of each."""

    preview: tuple[int, int]
    final: tuple[int, int]

    @classmethod
    def of(cls, size: tuple[int, int]) -> "Stages":
        """Of a picture of (width, height) pixels."""
        width, height = (side // CELL for side in size)
        ratio = height / width
        preview = (int(sqrt(ratio) * PREVIEW), int(sqrt(1 / ratio) * PREVIEW))
        return cls(preview, (height, width))

    @property
    def first(self) -> int:
        """Tokens of the preview."""
        return self.preview[0] * self.preview[1]

    @property
    def grid(self) -> Grid:
        """A grid with one place per token of both; see the module's docstring."""
        height, width = self.final
        if self.first % width == 0:
            return Grid(self.first // width + height, width)
        total = self.first + height * width
        return Grid(1, total) if width >= height else Grid(total, 1)

    def places(self) -> Int64[Tensor, "N 3"]:
        """Time, row and column of every token behind the prompt: the preview begins at 0, the
        picture where the preview's longer side ends."""
        parts, start = [], 0
        for height, width in (self.preview, self.final):
            t = torch.arange(height * width)
            parts.append(torch.stack([torch.zeros_like(t), t // width, t % width], 1) + start)
            start += max(height, width)
        return torch.cat(parts)


class GlmImage(DecoderModel):
    """No guidance. The prompt names both grids and ends with the start-of-image token."""

    family = "glm-image"
    title = "GLM-Image (autoregressive stage)"
    architectures = ("GlmImageForConditionalGeneration",)
    special_tokens = {  # noqa: RUF012
        "bos_token": "<|dit_token_16384|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>",
    }  # fmt: skip
    unused = (r"model\.(visual|vqmodel)\.",)

    @classmethod
    def configure(cls, values: Mapping[str, Any], folder: Path | None) -> FamilyConfig:
        text = Values(values.get("text_config") or {}, DEFAULTS, "text_config")
        vq = Values(values.get("vq_config") or {}, {"num_embeddings": 16384}, "vq_config")
        codes, theta = vq.count("num_embeddings"), text.rope()[0]
        rope = text.get("rope_parameters") or {}
        sections = tuple(rope.get("mrope_section") or (8, 12, 12))
        decoder = text.decoder(norms="sandwich", out_bias=False, mlp_bias=False)
        rotated = int(decoder.head_dim * float(rope.get("partial_rotary_factor") or 1.0))
        if 2 * sum(sections) != rotated or len(sections) != 3:
            raise WeightError(
                f"text_config: mrope_section {list(sections)} does not divide {rotated} dimensions"
            )
        return FamilyConfig(
            decoder=decoder,
            vocabulary=text.count("vocab_size"),
            image_vocab=codes,
            image_ids=tuple(range(codes)),
            row_id=None,
            theta=theta,
            factor=CELL,
            sizes=SIZES,
            sampling=_sampling(folder),
            extra={
                "sections": sections,
                "head_rows": text.count("vision_vocab_size"),
                "template": _template(folder),
            },
        )

    @classmethod
    def parameters(cls, config: FamilyConfig) -> list[Param]:
        c, prefix = config.decoder, "model.language_model."
        rotated = 2 * sum(config.extra["sections"])
        turn = partial(whole_rotation, head_dim=c.head_dim, rotated=rotated)
        names = LayerNames.hugging_face(prefix, fused_gate_up=True)
        table = (Source(f"{prefix}embed_tokens.weight", (config.vocabulary, c.dim)),)
        head = (Source("lm_head.weight", (config.extra["head_rows"], c.dim)),)
        return [
            Param("embed.weight", table, spread=c.dim**0.5),
            norm_param("norm", f"{prefix}norm", c),
            Param("head.weight", head, rows=config.image_ids),
            *layer_params(c, names, (turn, turn, None)),
        ]

    def _take_pixels(self, w: dict[str, Tensor]) -> None:
        colours = TokenColours(self.shape.image_vocab, CELL)
        self.pixels = Pixels(colours, self.options.pixel_memory)

    def grid_of(self, size: tuple[int, int]) -> Grid:
        if size not in self.sizes:
            raise self._refuse_size(size)
        return Stages.of(size).grid

    def stages(self, grid: Grid) -> Stages:
        """The two pictures that a grid stands for."""
        return next(s for s in map(Stages.of, self.sizes) if s.grid == grid)

    def encode_prompt(self, prompt: str, grid: Grid) -> tuple[int, ...]:
        s, stages = self.special, self.stages(grid)
        ids = self.text.encode(self.config.extra["template"].replace("{prompt}", prompt))
        for height, width in (stages.final, stages.preview):
            size = self.text.encode(f"{height} {width}")
            ids = [*ids, s["grid_bos_token"], *size, s["grid_eos_token"]]
        return self._fitting((*ids, s["bos_token"]), prompt)

    def unconditional_prompt(self, conditional: tuple[int, ...], grid: Grid) -> tuple[int, ...]:
        return self.encode_prompt("", grid)

    def picture_tokens(self, tokens: Int64[Tensor, "B N"], grid: Grid) -> Int64[Tensor, "B H W"]:
        stages = self.stages(grid)
        return tokens[:, stages.first :].view(len(tokens), *stages.final)

    def _take_rotary(self) -> None:
        """Angles of every position; a third table picks by axis in `_turned`."""
        sections: tuple[int, ...] = self.config.extra["sections"]
        device = self._embed.device
        self._places = {s.grid: s.places().to(device) for s in map(Stages.of, self.sizes)}
        longest = self.shape.prompt + max(int(p.max()) for p in self._places.values()) + 1
        frequencies = rotary_frequencies(self.config.theta, 2 * sum(sections), device)
        self._cos, self._sin = rotary_angles(torch.arange(longest, device=device), frequencies)

    def _turned(self, at: Int64[Tensor, "M 3"]) -> tuple[Tensor, Tensor]:
        """cos and sin [M, D/2] at (time, row, column); what is not rotated has angle 0."""
        sections: tuple[int, ...] = self.config.extra["sections"]
        still = self.shape.head_dim // 2 - sum(sections)

        def pick(table: Tensor, rest: float) -> Tensor:
            parts = table.split(sections, 1)
            axes = [part[at[:, i]] for i, part in enumerate(parts)]
            return torch.cat([*axes, table.new_full((len(at), still), rest)], 1)

        return pick(self._cos, 1.0), pick(self._sin, 0.0)

    def rotary_prompt(self, count: int) -> tuple[Tensor, Tensor]:
        return self._turned(torch.arange(count, device=self._embed.device)[:, None].expand(-1, 3))

    def rotary_visual(
        self, positions: Int64[Tensor, "M"], prompts: Int64[Tensor, "M"], grid: Grid
    ) -> tuple[Tensor, Tensor]:
        return self._turned(self._places[grid][positions] + prompts[:, None])


def whole_rotation(x: Tensor, head_dim: int, rotated: int) -> Tensor:
    """Rows of q or k reordered within every head, so that rotating the first `rotated` dimensions
    becomes a rotation of pairs (i, i + D/2), most of them by 0."""
    order = torch.arange(head_dim)
    turning, still = order[:rotated].chunk(2), order[rotated:].chunk(2)
    both = torch.cat([turning[0], still[0], turning[1], still[1]]) if rotated < head_dim else order
    turned: Tensor = x.unflatten(0, (-1, head_dim))[:, both].flatten(0, 1)
    return turned


def _sampling(folder: Path | None) -> Sampling:
    """generation_config.json's temperature, top_k and top_p; there is no guidance."""
    file = None if folder is None else folder / "generation_config.json"
    found = load_json(file) if file is not None and file.is_file() else {}
    values = {k: found[k] for k in ("temperature", "top_k", "top_p") if found.get(k) is not None}
    return Sampling(guidance_scale=1.0, **values)  # type: ignore[arg-type]


def _template(folder: Path | None) -> str:
    """What the chat template puts around `{prompt}`; `{prompt}` alone where there is none."""
    file = None if folder is None else folder / "chat_template.jinja"
    if file is None or not file.is_file():
        return "{prompt}"
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    chat = [{"role": "user", "content": [{"type": "text", "text": "{prompt}"}]}]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    try:
        template = environment.from_string(file.read_text(encoding="utf-8"))
        written = template.render(messages=chat, add_generation_prompt=False)
    except TemplateError as error:
        raise WeightError(f"cannot render {file}: {error}") from error
    if "{prompt}" not in written:
        raise WeightError(f"{file} drops the prompt")
    return written
