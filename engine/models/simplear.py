"""SimpleAR (Wang et al. 2025): Qwen2's layers, image tokens appended to the vocabulary.

Its pixels come from NVIDIA's Cosmos tokenizer (DV8x16x16), which is published as TorchScript:
`decoder.jit` is to lie beside the weights.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from engine.checkpoint import Checkpoint, Param
from engine.models.decoder import LayerNames, layer_params
from engine.models.family import DecoderModel, FamilyConfig, table_params
from engine.models.hf_config import LLAMA, Values
from engine.models.pixels import Pixels, TokenColours
from engine.models.text import FileTokenizer
from engine.weights import WeightError
from scheduler.request import Sampling
from sparse_attn.geometry import Grid

CODES, FACTOR, SIDE = 64000, 16, 1024
POSITIVE = "A highly realistic image of "
NEGATIVE = (
    "An image of aerial view, overexposed, low quality, deformation, a poor composition, bad "
    "hands, bad teeth, bad eyes, bad limbs, distortion"
)
DEFAULTS = LLAMA | {
    "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
}  # fmt: skip


class SimpleAR(DecoderModel):
    """Unconditional prompt: the authors' negative prompt, as long as it is."""

    family = "simplear"
    title = "SimpleAR"
    architectures = ("SimpARForCausalLM",)
    special_tokens = {"task_token": "<|t2i|>", "boi_token": "<|soi|>"}  # noqa: RUF012
    unused = (r"lm_head\.",)

    @classmethod
    def configure(cls, values: Mapping[str, Any], folder: Path | None) -> FamilyConfig:
        text = Values(values, DEFAULTS, "config.json")
        codes = int(values.get("image_codes") or CODES)
        side = int(values.get("image_size") or SIDE)
        theta, factor = text.rope()
        return FamilyConfig(
            decoder=text.decoder(qkv_bias=True, out_bias=False),
            vocabulary=text.count("vocab_size"),
            image_vocab=codes,
            image_ids=appended_ids(folder, codes, text.count("vocab_size")),
            row_id=None,
            theta=theta,
            rope_factor=factor,
            tied=text.flag("tie_word_embeddings"),
            factor=FACTOR,
            sizes=((side, side),),
            sampling=Sampling(guidance_scale=6.0),
            extra={"folder": folder},
        )

    @classmethod
    def parameters(cls, config: FamilyConfig) -> list[Param]:
        return [
            *table_params(config, "model.embed_tokens", "lm_head", "model.norm"),
            *layer_params(config.decoder, LayerNames.hugging_face("model.")),
        ]

    @classmethod
    def checkpoint(cls, folder: Path, config: FamilyConfig) -> Checkpoint:
        if not (folder / "decoder.jit").is_file():
            raise WeightError(
                f"{folder} has no pixel decoder: put decoder.jit of NVIDIA's "
                "Cosmos-1.0-Tokenizer-DV8x16x16 into it"
            )
        return super().checkpoint(folder, config)

    def _take_pixels(self, w: dict[str, Tensor]) -> None:
        folder = self.config.extra["folder"]
        if self.options.dummy or folder is None:
            self.pixels = Pixels(
                TokenColours(self.config.image_vocab, FACTOR), self.options.pixel_memory
            )
            return
        decoder = CosmosDecoder.load(folder / "decoder.jit", self.options.device)
        self.pixels = Pixels(decoder, self.options.pixel_memory)

    def encode_prompt(self, prompt: str, grid: Grid) -> tuple[int, ...]:
        return self._framed(POSITIVE + prompt)

    def unconditional_prompt(self, conditional: tuple[int, ...], grid: Grid) -> tuple[int, ...]:
        return self._framed(NEGATIVE)

    def _framed(self, words: str) -> tuple[int, ...]:
        s = self.special
        return self._fitting((s["task_token"], *self.text.encode(words), s["boi_token"]), words)


class CosmosDecoder(nn.Module):
    """A TorchScript decoder of indices [B, 1, H, W] into frames [B, 3, T, height, width]."""

    def __init__(self, script: nn.Module) -> None:
        super().__init__()
        self.script = script

    @classmethod
    def load(cls, file: Path, device: torch.device) -> "CosmosDecoder":
        """TorchScript is deprecated in torch, but the only form this decoder is published in."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                return cls(torch.jit.load(file, map_location=device))
        except RuntimeError as error:
            raise WeightError(f"{file} is no TorchScript file: {error}") from error

    def forward(
        self, tokens: Int64[Tensor, "B H W"], strips: int = 1
    ) -> Float[Tensor, "B 3 height width"]:
        return cast(Tensor, self.script(tokens[:, None]))[:, :, 0].float()

    def activation_bytes(self, height: int, width: int) -> int:
        """128 fp32 channels at full resolution, as in the published decoder."""
        return height * width * FACTOR**2 * 128 * 4


def appended_ids(folder: Path | None, codes: int, vocabulary: int) -> tuple[int, ...]:
    """Ids of image tokens behind the tokenizer's own. Raises WeightError if they do not fit."""
    first = vocabulary - codes if folder is None else len(FileTokenizer.of_folder(folder))
    if first < 0 or first + codes > vocabulary:
        raise WeightError(
            f"the vocabulary of {vocabulary} cannot hold {first} text and {codes} image tokens"
        )
    return tuple(range(first, first + codes))
