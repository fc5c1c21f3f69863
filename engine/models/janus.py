"""Janus and Janus-Pro (Chen et al. 2025): a Llama decoder with tables and a head for images alone.

Reads the checkpoints of transformers (`JanusForConditionalGeneration`) and the original ones
(`MultiModalityCausalLM`). Only text to image; the vision tower for image input is not loaded.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from engine.checkpoint import Param, Source
from engine.models.decoder import LayerNames, Projection, activate, layer_params, norm_param
from engine.models.family import DecoderModel, FamilyConfig
from engine.models.hf_config import LLAMA, Values
from engine.models.text import TextTokenizer
from engine.models.vqgan import VQGANConfig, VQGANDecoder, vqgan_params
from engine.weights import WeightError, load_json
from scheduler.request import Sampling
from sparse_attn.geometry import Grid

BOS, BOI, PAD = "<｜begin▁of▁sentence｜>", "<begin_of_image>", "<｜▁pad▁｜>"
SPECIAL = {"bos_token": BOS, "boi_token": BOI, "pad_tag": PAD}
"""The unconditional prompt's padding is a token of its own, not the tokenizer's `pad_token`."""
TEMPLATE = "<|User|>: {prompt}\n\n<|Assistant|>:"
VQ_DEFAULTS: Mapping[str, Any] = {
    "embed_dim": 8, "num_embeddings": 16384, "latent_channels": 256, "base_channels": 128,
    "channel_multiplier": (1, 1, 2, 2, 4), "num_res_blocks": 2, "out_channels": 3,
    "projection_dim": 2048, "num_hidden_layers": 2, "image_token_embed_dim": 2048,
    "hidden_act": "gelu",
}  # fmt: skip
ORIGINAL = (
    (r"^language_model\.model\.", "model.language_model."),
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^gen_vision_model\.", "model.vqmodel."),
    (r"^(model\.vqmodel\.decoder)\.conv_blocks\.", r"\1.up."),
    (r"^(model\.vqmodel\.decoder\.up\.\d+)\.res\.", r"\1.block."),
    (r"^(model\.vqmodel\.decoder\.mid)\.0\.", r"\1.block_1."),
    (r"^(model\.vqmodel\.decoder\.mid)\.1\.", r"\1.attn_1."),
    (r"^(model\.vqmodel\.decoder\.mid)\.2\.", r"\1.block_2."),
    (r"^gen_embed\.", "model.generation_embeddings."),
    (r"^gen_aligner\.layers\.0\.", "model.generation_aligner.fc1."),
    (r"^gen_aligner\.layers\.2\.", "model.generation_aligner.hidden_layers.0."),
    (r"^gen_head\.output_mlp_projector\.", "model.generation_head.proj_out."),
    (r"^gen_head\.vision_head\.", "model.generation_head.vision_head."),
)
"""Names of the original checkpoints -> those of transformers."""


class Janus(DecoderModel):
    """Unconditional prompt: as long as the conditional one, pads for all but the first token and
    begin-of-image."""

    family = "janus"
    title = "Janus, Janus-Pro"
    architectures = ("JanusForConditionalGeneration", "MultiModalityCausalLM")
    renames = ORIGINAL
    special_tokens = SPECIAL
    unused = (
        r"model\.vision_model\.", r"model\.aligner\.", r"vision_model\.", r"aligner\.",
        r"lm_head\.", r"model\.vqmodel\.(encoder|quant_conv)\.",
        r"model\.vqmodel\.quantize\.codebook_used$",
    )  # fmt: skip

    @classmethod
    def configure(cls, values: Mapping[str, Any], folder: Path | None) -> FamilyConfig:
        if "gen_vision_config" in values:
            return _configure_original(values)
        text = Values(values.get("text_config") or {}, LLAMA, "text_config")
        vq = Values(values.get("vq_config") or {}, VQ_DEFAULTS, "vq_config")
        vision = values.get("vision_config") or {}
        side = int(vision.get("image_size") or 384) // int(vision.get("patch_size") or 16)
        if vq.get("hidden_act") != "gelu":
            raise WeightError(f"vq_config: hidden_act {vq.get('hidden_act')!r} is not supported")
        pixels = VQGANConfig(
            codes=vq.count("num_embeddings"),
            code_dim=vq.count("embed_dim"),
            latent_channels=vq.count("latent_channels"),
            base_channels=vq.count("base_channels"),
            channel_multiplier=vq.numbers("channel_multiplier"),
            res_blocks=vq.count("num_res_blocks"),
            out_channels=vq.count("out_channels"),
        )
        extra = {
            "pixels": pixels,
            "projection": vq.count("projection_dim"),
            "aligner_layers": vq.count("num_hidden_layers"),
            "head_inputs": vq.count("image_token_embed_dim"),
        }
        return _config(text, extra, side)

    @classmethod
    def parameters(cls, config: FamilyConfig) -> list[Param]:
        c, prefix = config.decoder, "model.language_model."
        table = (Source(f"{prefix}embed_tokens.weight", (config.vocabulary, c.dim)),)
        return [
            Param("embed.weight", table, spread=c.dim**0.5),
            norm_param("norm", f"{prefix}norm", c),
            *layer_params(c, LayerNames.hugging_face(prefix)),
            *_image_params(config),
            *vqgan_params(config.extra["pixels"], "janus", "model.vqmodel."),
        ]

    @classmethod
    def tokens(cls, folder: Path, config: FamilyConfig) -> tuple[TextTokenizer, dict[str, int]]:
        """As in the base class; transformers' checkpoints say the ids in generation_config.json."""
        text, special = super().tokens(folder, config)
        file = folder / "generation_config.json"
        given = load_json(file) if file.is_file() else {}
        more = given.get("generation_kwargs")
        ids = {
            "bos_token": given.get("bos_token_id"),
            "boi_token": more.get("boi_token_id") if isinstance(more, dict) else None,
            "pad_tag": given.get("pad_token_id"),
        }
        return text, special | {key: i for key, i in ids.items() if isinstance(i, int)}

    def _take_tables(self, w: dict[str, Tensor]) -> None:
        backend = self.options.backend

        def linear(name: str) -> Projection:
            return Projection(w.pop(f"{name}.weight"), w[f"{name}.bias"], backend)

        self._embed = w["embed.weight"]
        self._codes = w["image_embed.weight"]
        self._aligner = [linear(f"aligner.{i}") for i in range(self.config.extra["aligner_layers"])]
        self._head_in, self._head = linear("head_in"), linear("head")
        self._bos, self._boi, self._pad = (self.special[key] for key in SPECIAL)

    def pixel_module(self) -> nn.Module:
        with torch.device("meta"):
            return VQGANDecoder(self.config.extra["pixels"])

    def encode_prompt(self, prompt: str, grid: Grid) -> tuple[int, ...]:
        words = self.text.encode(TEMPLATE.format(prompt=prompt.strip()))
        return self._fitting((self._bos, *words, self._boi), prompt)

    def unconditional_prompt(self, conditional: tuple[int, ...], grid: Grid) -> tuple[int, ...]:
        kept = (self._bos, self._boi)
        return tuple(i if i in kept else self._pad for i in conditional)

    def embed_visual(
        self, tokens: Int64[Tensor, "M"], positions: Int64[Tensor, "M"], grid: Grid
    ) -> Float[Tensor, "M d"]:
        x = self._aligner[0](self._codes[tokens])
        for layer in self._aligner[1:]:
            x = layer(activate(x, "gelu"))
        return x

    def logits(self, hidden: Float[Tensor, "M d"]) -> Float[Tensor, "M V"]:
        x = self._head_in(self._decoder.normed(hidden, self._norm))
        return self._head(activate(x, "gelu")).float()


def _config(text: Values, extra: dict[str, Any], side: int) -> FamilyConfig:
    pixels: VQGANConfig = extra["pixels"]
    theta, factor = text.rope()
    return FamilyConfig(
        decoder=text.decoder(),
        vocabulary=text.count("vocab_size"),
        image_vocab=pixels.codes,
        image_ids=(),
        row_id=None,
        theta=theta,
        rope_factor=factor,
        factor=pixels.factor,
        sizes=((side * pixels.factor, side * pixels.factor),),
        sampling=Sampling(guidance_scale=5.0),
        extra=extra,
    )


def _configure_original(values: Mapping[str, Any]) -> FamilyConfig:
    """config.json of the original repositories; their VQ-16 is fixed in code."""
    text = Values(values.get("language_config") or {}, LLAMA, "language_config")

    def params(key: str, defaults: Mapping[str, Any]) -> Values:
        found = values.get(key) or {}
        return Values(found.get("params") or {}, defaults, f"{key}.params")

    size = params("gen_vision_config", {"image_token_size": 16384, "n_embed": 8})
    head = params("gen_head_config", {"image_token_embed": 2048, "n_embed": 2048})
    aligner = params("gen_aligner_config", {"depth": 2, "n_embed": 2048})
    extra = {
        "pixels": VQGANConfig(codes=size.count("image_token_size"), code_dim=size.count("n_embed")),
        "projection": head.count("image_token_embed"),
        "aligner_layers": aligner.count("depth"),
        "head_inputs": head.count("n_embed"),
    }
    return _config(text, extra, 24)


def _image_params(config: FamilyConfig) -> list[Param]:
    e, dim, pixels = config.extra, config.decoder.dim, config.extra["pixels"]
    width = e["projection"]
    codes = (Source("model.generation_embeddings.weight", (pixels.codes, pixels.code_dim)),)

    def linear(ours: str, theirs: str, outputs: int, inputs: int) -> list[Param]:
        at = f"model.{theirs}"
        return [
            Param(f"{ours}.weight", (Source(f"{at}.weight", (outputs, inputs)),)),
            Param(f"{ours}.bias", (Source(f"{at}.bias", (outputs,)),), dtype=torch.float32),
        ]

    result = [Param("image_embed.weight", codes, spread=pixels.code_dim**0.5)]
    result += linear("aligner.0", "generation_aligner.fc1", dim, pixels.code_dim)
    for i in range(1, e["aligner_layers"]):
        result += linear(f"aligner.{i}", f"generation_aligner.hidden_layers.{i - 1}", dim, dim)
    result += linear("head_in", "generation_head.proj_out", width, dim)
    result += linear("head", "generation_head.vision_head", pixels.codes, width)
    return result
