"""Emu3-Gen (Wang et al. 2024): Llama layers with GQA, one vocabulary, rows that end with a token.

Reads the checkpoints of transformers (`Emu3ForConditionalGeneration`, newer and older names). What
follows the last row (end of frame, of image, of sequence) adds nothing to a picture and is not
drawn.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.checkpoint import Param
from engine.models.decoder import LayerNames, layer_params
from engine.models.emu3_vq import Emu3VQConfig, Emu3VQDecoder, emu3_vq_params
from engine.models.family import DecoderModel, FamilyConfig, table_params
from engine.models.hf_config import LLAMA, Values
from engine.weights import WeightError, load_json
from scheduler.request import Sampling
from sparse_attn.geometry import Grid

NEGATIVE = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, "
    "cropped, worst quality, low quality, normal quality, jpeg artifacts, signature, watermark, "
    "username, blurry."
)
"""The negative prompt the authors use."""
RATIOS = ((1, 1), (4, 3), (3, 4), (3, 2), (2, 3), (16, 9), (9, 16), (2, 1), (1, 2))
AREA = 720 * 720
END_OF_ROW = "<|extra_200|>"
DEFAULTS = LLAMA | {
    "vocab_size": 184622, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
}  # fmt: skip
VQ_DEFAULTS: Mapping[str, Any] = {
    "codebook_size": 32768, "embed_dim": 4, "latent_channels": 4, "out_channels": 3,
    "temporal_downsample_factor": 4, "base_channels": 256, "channel_multiplier": (1, 2, 2, 4),
    "num_res_blocks": 2, "attn_resolutions": (3,), "num_attention_heads": 1,
}  # fmt: skip


class Emu3(DecoderModel):
    """Unconditional prompt: a negative prompt of its own, as long as it is."""

    family = "emu3"
    title = "Emu3-Gen"
    architectures = ("Emu3ForConditionalGeneration",)
    special_tokens = {  # noqa: RUF012 - typed as a read-only mapping in the base class
        "bos_token": "<|extra_203|>", "boi_token": "<|image start|>",
        "image_wrapper_token": "<|image token|>",
    }  # fmt: skip
    renames = (
        (r"^text_model\.lm_head\.", "lm_head."),
        (r"^text_model\.model\.", "model.text_model."),
        (r"^text_model\.", "model.text_model."),
        (r"^vqmodel\.", "model.vqmodel."),
    )
    unused = (
        r"model\.vqmodel\.(encoder|quant_conv)\.", r".*\.num_batches_tracked$", r"lm_head\.",
    )  # fmt: skip

    @classmethod
    def configure(cls, values: Mapping[str, Any], folder: Path | None) -> FamilyConfig:
        text = Values(values.get("text_config") or {}, DEFAULTS, "text_config")
        vq = Values(values.get("vq_config") or {}, VQ_DEFAULTS, "vq_config")
        pixels = Emu3VQConfig(
            codebook_size=vq.count("codebook_size"),
            embed_dim=vq.count("embed_dim"),
            latent_channels=vq.count("latent_channels"),
            out_channels=vq.count("out_channels"),
            temporal_downsample_factor=vq.count("temporal_downsample_factor"),
            base_channels=vq.count("base_channels"),
            channel_multiplier=vq.numbers("channel_multiplier"),
            num_res_blocks=vq.count("num_res_blocks"),
            attn_resolutions=vq.numbers("attn_resolutions"),
            num_attention_heads=vq.count("num_attention_heads"),
        )
        ids, row = _visual_tokens(values.get("vocabulary_map"), pixels.codebook_size)
        theta, factor = text.rope()
        return FamilyConfig(
            decoder=text.decoder(),
            vocabulary=text.count("vocab_size"),
            image_vocab=pixels.codebook_size,
            image_ids=ids,
            row_id=row,
            theta=theta,
            rope_factor=factor,
            tied=bool(values.get("tie_word_embeddings")) or text.flag("tie_word_embeddings"),
            factor=pixels.factor,
            sizes=tuple(emu3_size(w, h, AREA, pixels.factor) for w, h in RATIOS),
            sampling=Sampling(guidance_scale=3.0, top_k=2048),
            extra={"pixels": pixels, "range": _pixel_range(folder)},
        )

    @classmethod
    def parameters(cls, config: FamilyConfig) -> list[Param]:
        prefix = "model.text_model."
        return [
            *table_params(config, f"{prefix}embed_tokens", "lm_head", f"{prefix}norm"),
            *layer_params(config.decoder, LayerNames.hugging_face(prefix)),
            *emu3_vq_params(config.extra["pixels"], "model.vqmodel."),
        ]

    def pixel_module(self) -> nn.Module:
        with torch.device("meta"):
            return Emu3VQDecoder(self.config.extra["pixels"])

    def pixel_range(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        mean, std = self.config.extra["range"]
        return mean, std

    def encode_prompt(self, prompt: str, grid: Grid) -> tuple[int, ...]:
        s, size = self.special, self.text.encode(f"{grid.height}*{grid.width}")
        words = self.text.encode(prompt)
        ids = (s["bos_token"], *words, s["boi_token"], *size, s["image_wrapper_token"])
        return self._fitting(ids, prompt)

    def unconditional_prompt(self, conditional: tuple[int, ...], grid: Grid) -> tuple[int, ...]:
        return self.encode_prompt(NEGATIVE, grid)


def emu3_size(width: int, height: int, area: int, factor: int) -> tuple[int, int]:
    """(width, height) in pixels of a picture of about `area` pixels with the ratio width:height."""
    scale = (area / (width * height)) ** 0.5 / factor
    return round(width * scale) * factor, round(height * scale) * factor


def _visual_tokens(vocabulary: Mapping[str, int] | None, codes: int) -> tuple[tuple[int, ...], int]:
    """Ids of the visual tokens in the order of the code book, and of the end-of-row token."""
    if vocabulary is None:  # as in the published checkpoints
        return tuple(range(151854, 151854 + codes)), 151846
    found = {
        int(match.group(1)): int(i)
        for name, i in vocabulary.items()
        if (match := re.fullmatch(r"<\|visual token (\d+)\|>", name))
    }
    if sorted(found) != list(range(codes)) or END_OF_ROW not in vocabulary:
        raise WeightError(
            f"vocabulary_map names {len(found)} visual tokens and "
            f"{'an' if END_OF_ROW in vocabulary else 'no'} end-of-row token; the pixel decoder has "
            f"{codes} codes"
        )
    return tuple(found[code] for code in range(codes)), int(vocabulary[END_OF_ROW])


def _pixel_range(folder: Path | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """image_mean and image_std of preprocessor_config.json, by which pictures were normalised."""
    half = (0.5, 0.5, 0.5)
    found: list[Any] = []
    for name in ("preprocessor_config.json", "processor_config.json"):
        if folder is not None and (folder / name).is_file():
            values = load_json(folder / name)
            nested = values.get("image_processor")
            found.append(nested if isinstance(nested, dict) else values)
    for values in found:
        if "image_mean" in values and "image_std" in values:
            return tuple(values["image_mean"]), tuple(values["image_std"])
    return half, half
