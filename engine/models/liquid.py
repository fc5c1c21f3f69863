"""Liquid (Wu et al. 2024): Gemma's layers, Chameleon's image tokens appended to the vocabulary.

The pixel decoder is Chameleon's VQGAN: `vqgan.ckpt` is to lie beside the weights.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from engine.checkpoint import Checkpoint, Param
from engine.models.chameleon import VQ_DEFAULTS, VQ_FILES, vqgan_config, vqgan_file
from engine.models.decoder import LayerNames, layer_params
from engine.models.family import DecoderModel, FamilyConfig, table_params
from engine.models.hf_config import LLAMA, Values
from engine.models.simplear import appended_ids
from engine.models.vqgan import VQGANDecoder, vqgan_params
from engine.weights import WeightError
from scheduler.request import Sampling
from sparse_attn.geometry import Grid

DEFAULTS = LLAMA | {
    "vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "rms_norm_eps": 1e-6,
    "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True,
}  # fmt: skip


class Liquid(DecoderModel):
    """Unconditional prompt: the word `<unconditional>`."""

    family = "liquid"
    title = "Liquid"
    architectures = ("GemmaForCausalLM", "MiniGeminiGemmaForCausalLM")
    special_tokens = {"bos_token": "<bos>", "boi_token": "<boi>"}  # noqa: RUF012
    unused = (r"vqgan\.(encoder|quant_conv|loss)\.", r"lm_head\.")

    @classmethod
    def configure(cls, values: Mapping[str, Any], folder: Path | None) -> FamilyConfig:
        text = Values(values, DEFAULTS, "config.json")
        vq = Values(values.get("vq_config") or {}, VQ_DEFAULTS, "vq_config")
        pixels = vqgan_config(vq)
        theta, factor = text.rope()
        side, vocabulary = vq.count("resolution"), text.count("vocab_size")
        return FamilyConfig(
            decoder=text.decoder(unit_offset=True),
            vocabulary=vocabulary,
            image_vocab=pixels.codes,
            image_ids=appended_ids(folder, pixels.codes, vocabulary),
            row_id=None,
            theta=theta,
            rope_factor=factor,
            tied=text.flag("tie_word_embeddings"),
            factor=pixels.factor,
            sizes=((side, side),),
            sampling=Sampling(guidance_scale=7.0, temperature=0.99, top_k=4096, top_p=0.96),
            extra={"pixels": pixels},
        )

    @classmethod
    def parameters(cls, config: FamilyConfig) -> list[Param]:
        return [
            *table_params(config, "model.embed_tokens", "lm_head", "model.norm"),
            *layer_params(config.decoder, LayerNames.hugging_face("model.")),
            *vqgan_params(config.extra["pixels"], "taming", "vqgan."),
        ]

    @classmethod
    def checkpoint(cls, folder: Path, config: FamilyConfig) -> Checkpoint:
        file = vqgan_file(folder)
        if file is None:
            raise WeightError(
                f"{folder} has no pixel decoder: put Chameleon's {VQ_FILES[1]} (or its tensors as "
                f"{VQ_FILES[0]}) into it"
            )
        return super().checkpoint(folder, config) | Checkpoint.of_files([file], prefix="vqgan.")

    def pixel_module(self) -> nn.Module:
        with torch.device("meta"):
            return VQGANDecoder(self.config.extra["pixels"])

    def embed_prompt(self, tokens: Int64[Tensor, "P"]) -> Float[Tensor, "P d"]:
        return super().embed_prompt(tokens) * self._scale

    def embed_visual(
        self, tokens: Int64[Tensor, "M"], positions: Int64[Tensor, "M"], grid: Grid
    ) -> Float[Tensor, "M d"]:
        return super().embed_visual(tokens, positions, grid) * self._scale

    @property
    def _scale(self) -> Tensor:
        """Gemma multiplies embeddings by the square root of the width, in their own precision."""
        root = torch.tensor(self.shape.dim**0.5, dtype=self._embed.dtype)
        return root.to(self._embed.device)

    def encode_prompt(self, prompt: str, grid: Grid) -> tuple[int, ...]:
        return self._framed(f"{prompt} Generate an image based on this description.")

    def unconditional_prompt(self, conditional: tuple[int, ...], grid: Grid) -> tuple[int, ...]:
        return self._framed("<unconditional>")

    def _framed(self, words: str) -> tuple[int, ...]:
        s = self.special
        return self._fitting((s["bos_token"], *self.text.encode(words), s["boi_token"]), words)
