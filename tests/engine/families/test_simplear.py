"""SimpleAR and Liquid against transformers' Qwen2 and Gemma over the published token layout."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GemmaConfig, GemmaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from engine.models.liquid import Liquid
from engine.models.simplear import NEGATIVE, SimpleAR
from engine.weights import WeightError
from sparse_attn.attention import Backend
from tests.engine.families import harness, vq_reference

CODES = 64
QWEN = ("<|t2i|>", "<|soi|>")
GEMMA = ("<bos>", "<boi>", "<unconditional>")
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "vocab_size": 400,
}  # fmt: skip


class Script(nn.Module):
    """Stands in for the Cosmos decoder: the index as a brightness, 16 x 16 pixels and 2 frames."""

    def forward(self, indices: Tensor) -> Tensor:
        small = (indices.float() / 32 - 1).repeat_interleave(16, 2).repeat_interleave(16, 3)
        return small[:, None].repeat(1, 3, 2, 1, 1)


def publish(folder: Path, model: nn.Module, **values: object) -> None:
    """save_pretrained with the config of a family that transformers lacks."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)  # type: ignore[operator]
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(config))


def vocabulary(special: tuple[str, ...]) -> dict[str, int]:
    words = harness.byte_vocabulary()
    return words | {name: len(words) + i for i, name in enumerate(special)}


def save_simplear(folder: Path, **values: object) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES | values)).eval()  # type: ignore[arg-type]
    names = {"architectures": ["SimpARForCausalLM"], "image_codes": CODES, "image_size": 64}
    publish(folder, model, **names)
    harness.save_fast(harness.word_tokenizer(vocabulary(QWEN), QWEN), folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(Script()).save(folder / "decoder.jit")
    return model


def load_simplear(folder: Path, backend: Backend | None = None) -> SimpleAR:
    return SimpleAR.load("simplear", folder, harness.options(backend))


def save_liquid(folder: Path, **values: object) -> GemmaForCausalLM:
    torch.manual_seed(0)
    config = GemmaConfig(**{**SIZES, "head_dim": 32} | values)  # type: ignore[arg-type]
    model = GemmaForCausalLM(config).eval()
    vq = {
        "embed_dim": 32, "num_embeddings": CODES, "latent_channels": 32, "resolution": 16,
        "base_channels": 32, "channel_multiplier": [1, 1, 2], "num_res_blocks": 1,
    }  # fmt: skip
    publish(folder, model, vq_config=vq)
    decoder = vq_reference.taming(
        codes=CODES, code_dim=32, latent=32, base=32, multiplier=(1, 1, 2)
    )
    save_file(decoder.state_dict(), folder / "vqgan.safetensors")
    harness.save_fast(harness.word_tokenizer(vocabulary(GEMMA), GEMMA), folder)
    return model


def load_liquid(folder: Path, backend: Backend | None = None) -> Liquid:
    return Liquid.load("liquid", folder, harness.options(backend))


def reference(model: Qwen2ForCausalLM | GemmaForCausalLM, first: int) -> harness.Reference:
    """Image tokens follow the tokenizer's own from id `first`."""

    def logits(prompt: tuple[int, ...], tokens: list[int]) -> Tensor:
        ids = torch.tensor([[*prompt, *(first + t for t in tokens[:-1])]])
        with torch.inference_mode():
            return model(input_ids=ids).logits[0, len(prompt) - 1 :, first : first + CODES]

    return logits


@pytest.mark.parametrize("values", [{}, {"tie_word_embeddings": True, "num_key_value_heads": 1}])
def test_simplear(tmp_path: Path, values: dict[str, object]) -> None:
    theirs = save_simplear(tmp_path, **values)
    ours = load_simplear(tmp_path)
    tokens = harness.prove(ours, reference(theirs, 256 + len(QWEN)))
    encode = harness.word_tokenizer(vocabulary(QWEN), QWEN).encode
    said = "<|t2i|>A highly realistic image of a cat<|soi|>"
    assert ours.encode_prompt("a cat", ours.grid) == tuple(encode(said).ids)
    unsaid = encode(f"<|t2i|>{NEGATIVE}<|soi|>").ids
    assert ours.unconditional_prompt((), ours.grid) == tuple(unsaid)
    picture = ours.decode_pixels(torch.tensor(tokens), ours.grid)
    assert picture.shape == (len(tokens), 64, 64, 3)
    level = (tokens[0][0] / 32 - 1) * 0.5 + 0.5
    assert abs(int(picture[0, 3, 3, 0]) - 255 * level) <= 1


@pytest.mark.parametrize("values", [{}, {"num_key_value_heads": 4}])
def test_liquid(tmp_path: Path, values: dict[str, object]) -> None:
    theirs = save_liquid(tmp_path, **values)
    ours = load_liquid(tmp_path)
    harness.prove(ours, reference(theirs, 256 + len(GEMMA)))
    encode = harness.word_tokenizer(vocabulary(GEMMA), GEMMA).encode
    said = "<bos>a cat Generate an image based on this description.<boi>"
    assert ours.encode_prompt("a cat", ours.grid) == tuple(encode(said).ids)
    unsaid = encode("<bos><unconditional><boi>").ids
    assert ours.unconditional_prompt((), ours.grid) == tuple(unsaid)


def test_their_pixel_decoders_are_asked_for(tmp_path: Path) -> None:
    save_simplear(tmp_path / "s")
    (tmp_path / "s" / "decoder.jit").unlink()
    with pytest.raises(WeightError, match=r"decoder\.jit.*Cosmos"):
        load_simplear(tmp_path / "s")
    save_liquid(tmp_path / "l")
    (tmp_path / "l" / "vqgan.safetensors").unlink()
    with pytest.raises(WeightError, match=r"vqgan\.ckpt"):
        load_liquid(tmp_path / "l")
