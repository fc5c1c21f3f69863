"""Emu3 against transformers: prompts, logits, greedy pictures, pixels."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Emu3Config, Emu3ForConditionalGeneration

from engine.models.emu3 import NEGATIVE, Emu3, emu3_size
from sparse_attn.attention import Backend
from tests.engine.families import harness

CODES = 64
SPECIAL = (
    "<|extra_203|>", "<|extra_200|>", "<|extra_201|>", "<|image start|>", "<|image token|>",
    "<|image end|>", "<image>",
)  # fmt: skip


def vocabulary() -> dict[str, int]:
    words = harness.byte_vocabulary()
    for name in [*SPECIAL, *(f"<|visual token {i:06d}|>" for i in range(CODES))]:
        words[name] = len(words)
    return words


def save(folder: Path, tied: bool = False, **text: object) -> Emu3ForConditionalGeneration:
    torch.manual_seed(0)
    shard = str(text.pop("shard", "5GB"))
    values = {
        "vocab_size": 350, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "pad_token_id": 0, "bos_token_id": 256, "eos_token_id": 257,
    }  # fmt: skip
    config = Emu3Config(
        text_config=values | text,
        vq_config={
            "codebook_size": CODES, "base_channels": 32, "channel_multiplier": [1, 2, 2],
            "num_res_blocks": 1, "attn_resolutions": [2], "hidden_size": 64,
            "num_attention_heads": 1,
        },
        vocabulary_map=vocabulary(),
        tie_word_embeddings=tied,
    )  # fmt: skip
    model = Emu3ForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer.add_(0.2 * torch.rand_like(buffer))
    model.save_pretrained(folder, max_shard_size=shard)
    harness.save_fast(
        harness.word_tokenizer(vocabulary(), SPECIAL), folder,
        bos_token=SPECIAL[0], boi_token=SPECIAL[3], image_wrapper_token=SPECIAL[4],
    )  # fmt: skip
    return model


def load(folder: Path, backend: Backend | None = None) -> Emu3:
    model = Emu3.load("emu3", folder, harness.options(backend))
    model.sizes = ((16, 16), (24, 12), (8, 20))
    return model


def reference(model: Emu3ForConditionalGeneration) -> harness.Reference:
    mapping = model.vocabulary_mapping
    table = [mapping.img2bpe[i] for i in range(CODES)] + [mapping.eol_token_id]

    def logits(prompt: tuple[int, ...], tokens: list[int]) -> Tensor:
        ids = torch.tensor([[*prompt, *(table[t] for t in tokens[:-1])]])
        with torch.inference_mode():
            return model(input_ids=ids).logits[0, len(prompt) - 1 :, table[:CODES]]

    return logits


@pytest.mark.parametrize("size", [(16, 16), (24, 12)])
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"num_key_value_heads": 4, "attention_bias": False, "rope_theta": 1e4},
        {"num_key_value_heads": 1, "head_dim": 32, "tied": True},
        {"shard": "100KB"},
    ],
)
def test_pictures_are_those_of_transformers(
    tmp_path: Path, values: dict[str, object], size: tuple[int, int]
) -> None:
    theirs = save(tmp_path, **dict(values))  # type: ignore[arg-type]
    assert ("shard" in values) == (tmp_path / "model.safetensors.index.json").is_file()
    ours = load(tmp_path)
    tokens = torch.tensor(harness.prove(ours, reference(theirs), size=size))
    grid = ours.grid_of(size)
    assert (grid.row_tokens, grid.width) == (1, size[0] // 4)
    picture = ours.picture_tokens(tokens, grid)
    with torch.inference_mode():
        expected = theirs.model.vqmodel.decode(picture)
    assert (ours.pixels.decode(picture) - expected).abs().max() <= 1e-4


def test_a_negative_prompt_of_another_length(tmp_path: Path) -> None:
    theirs = save(tmp_path)
    ours = load(tmp_path)
    harness.prove(ours, reference(theirs), negative="blurred, and a good deal longer than that")


def test_both_spellings_of_the_names_load(tmp_path: Path) -> None:
    """transformers saves the older names; its modules have the newer ones."""
    theirs = save(tmp_path)
    assert "text_model.lm_head.weight" in load_file(tmp_path / "model.safetensors")
    old = load(tmp_path)
    newer = {name: tensor.contiguous() for name, tensor in theirs.state_dict().items()}
    assert "model.text_model.embed_tokens.weight" in newer
    save_file(newer, tmp_path / "model.safetensors")
    new = load(tmp_path)
    hidden = torch.randn(3, 64)
    assert old.logits(hidden).equal(new.logits(hidden))
    one, other = (m._decoder._layers[1] for m in (old, new))
    assert one.qkv(hidden).equal(other.qkv(hidden))
    assert one.gate_up(hidden).equal(other.gate_up(hidden))


def test_prompts_are_those_of_the_processor(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, Emu3ImageProcessor, Emu3Processor

    save(tmp_path)
    ours = load(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for name, token in zip(
        ("image_token", "eoi_token", "eof_token"), (SPECIAL[6], SPECIAL[5], SPECIAL[2]), strict=True
    ):
        setattr(tokenizer, name, token)
    tokenizer.image_token_id = vocabulary()["<image>"]
    processor = Emu3Processor(Emu3ImageProcessor(), tokenizer)
    grid = ours.grid_of((24, 12))
    values = {"return_for_image_generation": True, "ratio": "2:1", "image_area": 24 * 12 * 4}
    for prompt in (*harness.PROMPTS, NEGATIVE[:150]):
        assert processor.calculate_generate_size("2:1", 24 * 12 * 4, 8) == (3, 6)
        expected = processor(text=prompt, **values)["input_ids"][0]
        assert list(ours.encode_prompt(prompt, grid)) == list(expected)


def test_sizes_are_those_of_the_processor() -> None:
    assert emu3_size(1, 1, 720 * 720, 8) == (720, 720)
    assert emu3_size(16, 9, 720 * 720, 8) == (960, 544)
