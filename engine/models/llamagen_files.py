"""LlamaGen's published .pt files -> a folder that `LlamaGen` loads. Nothing in them is executed."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from engine.checkpoint import read_torch_file
from engine.weights import WeightError

HEADS = {768: 12, 1024: 16, 1280: 20, 1536: 24, 2048: 32, 2560: 40, 3200: 32, 4096: 32}
"""Attention heads of the published sizes (B, L, XL, XXL, 1B, XXXL, 3B, 7B) by width; no file says
them."""
MULTIPLIERS = {5: (1, 1, 2, 2, 4), 4: (1, 2, 2, 4)}
"""Channel multipliers of VQ-16 and VQ-8 by their number of levels."""


def convert(
    transformer: Path,
    tokenizer: Path,
    folder: Path,
    image_size: int,
    t5: Path | None = None,
    heads: int | None = None,
) -> None:
    """Write config.json and model.safetensors into `folder`.

    transformer: c2i_*.pt or t2i_*.pt. tokenizer: vq_ds16_*.pt or vq_ds8_*.pt. image_size: side of
    the pictures in pixels, which the files do not say (256, 384 or 512). t5: a folder with the T5
    encoder of captions, copied. heads: attention heads, for sizes that were never published.

    Raises WeightError for files of another layout, ValueError for an image size that cannot be.
    """
    weights, pixels = read_torch_file(transformer), read_torch_file(tokenizer)
    weights = {k: v for k, v in weights.items() if k != "freqs_cis"}
    config = describe(weights, pixels, heads) | {"image_size": image_size}
    factor = 2 ** (len(config["channel_multiplier"]) - 1)
    if image_size < factor or image_size % factor:
        raise ValueError(f"image_size must be a multiple of {factor}, got {image_size}")
    folder.mkdir(parents=True, exist_ok=True)
    kept = {
        f"vq.{k}": v for k, v in pixels.items() if not k.startswith(("encoder.", "quant_conv."))
    }
    tensors = {k: v.contiguous() for k, v in (weights | kept).items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if t5 is not None:
        shutil.copytree(t5, folder / "t5", dirs_exist_ok=True)


def describe(
    weights: Mapping[str, Tensor], pixels: Mapping[str, Tensor], heads: int | None
) -> dict[str, Any]:
    """What the shapes say: config.json without the image size."""
    try:
        return _describe(weights, pixels, heads)
    except KeyError as error:
        raise WeightError(f"no LlamaGen checkpoint: it lacks the tensor {error}") from error


def _describe(
    weights: Mapping[str, Tensor], pixels: Mapping[str, Tensor], heads: int | None
) -> dict[str, Any]:
    codes, dim = weights["tok_embeddings.weight"].shape
    heads = heads or HEADS.get(dim)
    if heads is None or dim % heads:
        raise WeightError(f"a LlamaGen of width {dim} is not known: give its number of heads")
    wide = weights["layers.0.attention.wqkv.weight"].shape[0]
    levels = len({k.split(".")[2] for k in pixels if k.startswith("decoder.conv_blocks.")})
    if levels not in MULTIPLIERS:
        raise WeightError(f"a VQ decoder with {levels} levels is neither VQ-8 nor VQ-16")
    multiplier = MULTIPLIERS[levels]
    classes = weights.get("cls_embedding.embedding_table.weight")
    blocks = {k.split(".")[4] for k in pixels if k.startswith("decoder.conv_blocks.0.res.")}
    condition = (
        {"mode": "c2i", "num_classes": len(classes) - 1}
        if classes is not None
        else _captions(weights["cls_embedding.uncond_embedding"])
    )
    return {
        "family": "llamagen",
        "architectures": ["LlamaGen"],
        "hidden_size": dim,
        "intermediate_size": len(weights["layers.0.feed_forward.w1.weight"]),
        "num_hidden_layers": len({k.split(".")[1] for k in weights if k.startswith("layers.")}),
        "num_attention_heads": heads,
        "num_key_value_heads": (wide - dim) // 2 // (dim // heads),
        "vocab_size": codes,
        "code_dim": pixels["quantize.embedding.weight"].shape[1],
        "latent_channels": pixels["post_quant_conv.weight"].shape[0],
        "base_channels": pixels["decoder.conv_out.weight"].shape[1] // multiplier[0],
        "channel_multiplier": list(multiplier),
        "num_res_blocks": len(blocks) - 1,
    } | condition


def _captions(learnt: Tensor) -> dict[str, Any]:
    tokens, width = learnt.shape
    return {"mode": "t2i", "caption_tokens": tokens, "caption_dim": width}
