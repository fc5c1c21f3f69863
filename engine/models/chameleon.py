"""Chameleon's family: Chameleon and Anole (Chameleon Team 2024; Chern et al. 2024), Lumina-mGPT
(Liu et al. 2024).

One vocabulary for text and images; the head's rows of the 8,192 image tokens alone are kept, so
that nothing else can be drawn and nothing else is computed. The checkpoints of transformers lack
the decoder half of the VQGAN: it comes from `model.vqmodel.decoder.*` where a checkpoint has it
(Anole), or from the original `vqgan.ckpt` laid beside the weights.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from engine.checkpoint import Checkpoint, Param
from engine.models.decoder import LayerNames, layer_params
from engine.models.family import DecoderModel, FamilyConfig, table_params
from engine.models.hf_config import LLAMA, Values
from engine.models.vqgan import VQGANConfig, VQGANDecoder, vqgan_params
from engine.weights import WeightError
from scheduler.request import Sampling
from sparse_attn.geometry import Grid

VQ_FILES = ("vqgan.safetensors", "vqgan.ckpt")
DEFAULTS = LLAMA | {
    "vocab_size": 65536, "num_key_value_heads": 32, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
}  # fmt: skip
VQ_DEFAULTS: Mapping[str, Any] = {
    "embed_dim": 256, "num_embeddings": 8192, "latent_channels": 256, "base_channels": 128,
    "channel_multiplier": (1, 1, 2, 2, 4), "num_res_blocks": 2, "resolution": 512,
}  # fmt: skip


class Chameleon(DecoderModel):
    """Chameleon and Anole: 512 x 512 pictures. Unconditional prompt: begin-of-sequence and
    begin-of-image alone (with text alone given, the two scales of the original's guidance come to
    the one for text)."""

    family = "chameleon"
    title = "Chameleon, Anole"
    architectures: ClassVar[tuple[str, ...]] = ("ChameleonForConditionalGeneration",)
    special_tokens: ClassVar[Mapping[str, str]] = {
        "bos_token": "<s>", "boi_token": "<racm3:break>", "sep_token": "<reserved08706>",
    }  # fmt: skip
    unused = (
        r"model\.vqmodel\.(encoder|quant_conv|quantize\.embedding|decoder|post_quant_conv)\.",
        r"vqgan\.(encoder|quant_conv|loss)\.", r"lm_head\.",
    )  # fmt: skip

    @classmethod
    def configure(cls, values: Mapping[str, Any], folder: Path | None) -> FamilyConfig:
        text = Values(values, DEFAULTS, "config.json")
        vq = Values(values.get("vq_config") or {}, VQ_DEFAULTS, "vq_config")
        if vq.get("attn_resolutions"):
            raise WeightError("vq_config: attn_resolutions are not supported")
        order = "post" if text.flag("swin_norm") else "pre"
        pixels = vqgan_config(vq)
        theta, factor = text.rope()
        return FamilyConfig(
            decoder=text.decoder(qk_norm="layer", norms=order),
            vocabulary=text.count("vocab_size"),
            image_vocab=pixels.codes,
            image_ids=image_ids(values.get("vocabulary_map"), pixels.codes, folder),
            row_id=cls.row_id(values),
            theta=theta,
            rope_factor=factor,
            tied=text.flag("tie_word_embeddings"),
            factor=pixels.factor,
            sizes=cls.picture_sizes(values, vq.count("resolution"), folder),
            sampling=cls.defaults(),
            extra={"pixels": pixels, "vq": _vq_prefix(folder)},
        )

    @classmethod
    def row_id(cls, values: Mapping[str, Any]) -> int | None:
        return None

    @classmethod
    def picture_sizes(
        cls, values: Mapping[str, Any], resolution: int, folder: Path | None
    ) -> tuple[tuple[int, int], ...]:
        return ((resolution, resolution),)

    @classmethod
    def defaults(cls) -> Sampling:
        return Sampling(guidance_scale=3.0, temperature=0.7, top_p=0.9)

    @classmethod
    def parameters(cls, config: FamilyConfig) -> list[Param]:
        return [
            *table_params(config, "model.embed_tokens", "lm_head", "model.norm"),
            *layer_params(config.decoder, LayerNames.hugging_face("model.")),
            *vqgan_params(config.extra["pixels"], "taming", config.extra["vq"]),
        ]

    @classmethod
    def checkpoint(cls, folder: Path, config: FamilyConfig) -> Checkpoint:
        weights = super().checkpoint(folder, config)
        file = vqgan_file(folder)
        if file is not None:
            return weights | Checkpoint.of_files([file], prefix="vqgan.")
        if not any(name.startswith("model.vqmodel.decoder.") for name in weights.entries):
            raise WeightError(
                f"{folder} has no pixel decoder: transformers' Chameleon keeps the encoder half of "
                f"the VQGAN only. Put the original {VQ_FILES[1]} (or its tensors as {VQ_FILES[0]}) "
                "into the folder"
            )
        return weights

    def pixel_module(self) -> nn.Module:
        with torch.device("meta"):
            return VQGANDecoder(self.config.extra["pixels"])

    def encode_prompt(self, prompt: str, grid: Grid) -> tuple[int, ...]:
        s = self.special
        ids = (s["bos_token"], *self.text.encode(prompt), s["sep_token"], s["boi_token"])
        return self._fitting(ids, prompt)

    def unconditional_prompt(self, conditional: tuple[int, ...], grid: Grid) -> tuple[int, ...]:
        return (self.special["bos_token"], self.special["boi_token"])


class LuminaMGPT(Chameleon):
    """Lumina-mGPT: any grid of 32-pixel cells. The prompt ends with begin-of-image and two size
    tokens, every row ends with a newline token, and the unconditional prompt is what begins at
    begin-of-image."""

    family = "lumina-mgpt"
    title = "Lumina-mGPT"
    architectures = ("ChameleonXLLMXForConditionalGeneration",)
    NEWLINE, SIZE, CELL = 8803, 8804, 32
    """Ids of the newline token and of the size token "0 cells"; pixels per cell."""

    @classmethod
    def row_id(cls, values: Mapping[str, Any]) -> int | None:
        vocabulary = values.get("vocabulary_map") or {}
        return int(vocabulary.get("<reserved08799>", cls.NEWLINE))

    @classmethod
    def picture_sizes(
        cls, values: Mapping[str, Any], resolution: int, folder: Path | None
    ) -> tuple[tuple[int, int], ...]:
        """The shapes it was trained on: at most (target / 32)^2 cells, no longer than 4:1.

        The target is `target_size` of config.json, or else what the folder's path says (the
        published repositories end in -512, -768 or -1024), or else 768.
        """
        path = "" if folder is None else str(folder)
        named = re.findall(r"Lumina-mGPT-\w+?-(512|768|1024)(?!\d)", path)
        return lumina_sizes(int(values.get("target_size") or (named[-1] if named else 768)))

    @classmethod
    def defaults(cls) -> Sampling:
        return Sampling(guidance_scale=3.0, top_k=2000)

    def encode_prompt(self, prompt: str, grid: Grid) -> tuple[int, ...]:
        s, factor = self.special, self.config.factor
        width, height = grid.width * factor, grid.height * factor
        asked = (
            f"Generate an image of {width}x{height} according to the following prompt:\n{prompt}"
        )
        cells = (self.SIZE + height // self.CELL, self.SIZE + width // self.CELL)
        ids = (s["bos_token"], *self.text.encode(asked), s["sep_token"], s["boi_token"], *cells)
        return self._fitting(ids, prompt)

    def unconditional_prompt(self, conditional: tuple[int, ...], grid: Grid) -> tuple[int, ...]:
        return conditional[-3:]


def lumina_sizes(target: int, longest: float = 4.0) -> tuple[tuple[int, int], ...]:
    """(width, height) of every shape for a target of target x target pixels, the square first."""
    cell, most = LuminaMGPT.CELL, (target // LuminaMGPT.CELL) ** 2
    found, width, height = [], most, 1
    while width > 0:
        if max(width, height) <= longest * min(width, height):
            found.append((width * cell, height * cell))
        if (height + 1) * width <= most:
            height += 1
        else:
            width -= 1
    found.sort(key=lambda size: (size != (target, target), -size[0]))
    return tuple(found)


def image_ids(
    vocabulary: Mapping[str, int] | None, codes: int, folder: Path | None
) -> tuple[int, ...]:
    """Ids of the image tokens in the order of the code book: `IMGIMG` + digits as letters + `Z`."""
    if vocabulary is None and folder is None:
        return tuple(range(4, 4 + codes))
    names = vocabulary if vocabulary is not None else _vocabulary(folder)
    digits = str.maketrans("ABCDEFGHIJ", "0123456789")
    found = {
        int(name[len("IMGIMG") : -1].translate(digits)): int(i)
        for name, i in names.items()
        if re.fullmatch(r"IMGIMG[A-J]+Z", name)
    }
    if sorted(found) != list(range(codes)):
        raise WeightError(
            f"the vocabulary names {len(found)} image tokens (IMGIMG...Z), the pixel decoder has "
            f"{codes}"
        )
    return tuple(found[code] for code in range(codes))


def _vocabulary(folder: Path | None) -> Mapping[str, int]:
    assert folder is not None
    file = folder / "tokenizer.json"
    try:
        found: Mapping[str, int] = json.loads(file.read_text(encoding="utf-8"))["model"]["vocab"]
    except (OSError, ValueError, KeyError) as error:
        raise WeightError(
            f"config.json has no vocabulary_map and {file} holds no vocabulary: {error!r}"
        ) from error
    return found


def vqgan_config(vq: Values) -> VQGANConfig:
    """Chameleon's pixel decoder, which Liquid shares."""
    return VQGANConfig(
        codes=vq.count("num_embeddings"),
        code_dim=vq.count("embed_dim"),
        latent_channels=vq.count("latent_channels"),
        base_channels=vq.count("base_channels"),
        channel_multiplier=vq.numbers("channel_multiplier"),
        res_blocks=vq.count("num_res_blocks"),
        level_attention=False,
        normalize_codes=False,
    )


def vqgan_file(folder: Path) -> Path | None:
    """The original pixel decoder beside the weights, if it is there."""
    return next((folder / name for name in VQ_FILES if (folder / name).is_file()), None)


def _vq_prefix(folder: Path | None) -> str:
    return "model.vqmodel." if folder is None or vqgan_file(folder) is None else "vqgan."
