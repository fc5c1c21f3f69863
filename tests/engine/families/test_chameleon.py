"""Chameleon against transformers, whose head the tests use past its image mask, and the VQGAN
decoder that transformers lacks against an independent one."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import ChameleonConfig, ChameleonForConditionalGeneration

from engine.models.chameleon import Chameleon, LuminaMGPT, lumina_sizes
from engine.weights import WeightError
from tests.engine.families import harness, vq_reference

CODES = 64
SPECIAL = ("<s>", "<racm3:break>", "<reserved08706>", "<reserved08799>", "<eoss>", "<image>")


def vocabulary() -> dict[str, int]:
    """Bytes, special tokens, and image tokens in an order that is not that of the code book."""
    words = harness.byte_vocabulary()
    names = [
        "IMGIMG" + str(i).translate(str.maketrans("0123456789", "ABCDEFGHIJ")) + "Z"
        for i in range(CODES)
    ]
    for name in [*SPECIAL, *sorted(names)]:
        words[name] = len(words)
    return words


def config(**values: object) -> ChameleonConfig:
    words = vocabulary()
    return ChameleonConfig(
        **{
            "vocab_size": 400, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512,
            "vocabulary_map": words,
            "vq_config": {
                "embed_dim": 32, "num_embeddings": CODES, "latent_channels": 32, "resolution": 16,
                "base_channels": 32, "channel_multiplier": [1, 1, 2], "num_res_blocks": 1,
            },
        } | values
    )  # fmt: skip


def save(folder: Path, **values: object) -> ChameleonForConditionalGeneration:
    torch.manual_seed(0)
    model = ChameleonForConditionalGeneration(config(**values)).eval()
    for parameter in model.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    vq = vq_reference.taming(codes=CODES, code_dim=32, latent=32, base=32, multiplier=(1, 1, 2))
    save_file(vq.state_dict(), folder / "vqgan.safetensors")
    harness.save_fast(
        harness.word_tokenizer(vocabulary(), SPECIAL), folder,
        bos_token="<s>", boi_token="<racm3:break>", sep_token="<reserved08706>",
    )  # fmt: skip
    return model


def reference(model: ChameleonForConditionalGeneration) -> harness.Reference:
    """Logits before transformers forbids image tokens; token 64 is the newline of Lumina's rows."""
    words = vocabulary()
    ids = [words[name] for name in sorted(words) if name.startswith("IMGIMG")]
    codes = model.model.vocabulary_mapping.bpe2img
    order = sorted(ids, key=lambda i: codes[i])
    table = [*order, words["<reserved08799>"]]

    def logits(prompt: tuple[int, ...], tokens: list[int]) -> Tensor:
        sequence = torch.tensor([[*prompt, *(table[t] for t in tokens[:-1])]])
        with torch.inference_mode():
            hidden = model.model(input_ids=sequence).last_hidden_state[0, len(prompt) - 1 :]
            return model.lm_head(hidden)[:, order]

    return logits


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
        {"swin_norm": True, "attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": True, "num_key_value_heads": 1},
    ],
)
def test_pictures_are_those_of_transformers(tmp_path: Path, values: dict[str, object]) -> None:
    theirs = save(tmp_path, **values)
    ours = Chameleon.load("chameleon", tmp_path, harness.options())
    tokens = harness.prove(ours, reference(theirs))
    picture = torch.tensor(tokens)
    vq = vq_reference.taming(codes=CODES, code_dim=32, latent=32, base=32, multiplier=(1, 1, 2))
    vq.load_state_dict(load_file(tmp_path / "vqgan.safetensors"))
    expected = vq(ours.picture_tokens(picture, ours.grid))
    got = ours.pixels.decode(ours.picture_tokens(picture, ours.grid))
    assert (got - expected).abs().max() <= 1e-4


def test_the_pixel_decoder_may_lie_in_the_checkpoint(tmp_path: Path) -> None:
    """As in Anole's: model.vqmodel.decoder.*"""
    save(tmp_path)
    vq = load_file(tmp_path / "vqgan.safetensors")
    before = Chameleon.load("a", tmp_path, harness.options())
    (tmp_path / "vqgan.safetensors").unlink()
    with pytest.raises(WeightError, match=r"no pixel decoder.*vqgan\.ckpt"):
        Chameleon.load("a", tmp_path, harness.options())
    weights = load_file(tmp_path / "model.safetensors")
    save_file(
        weights | {f"model.vqmodel.{k}": v for k, v in vq.items()}, tmp_path / "model.safetensors"
    )
    after = Chameleon.load("a", tmp_path, harness.options())
    tokens = torch.randint(0, CODES, (1, 4, 4))
    assert before.pixels.decode(tokens).equal(after.pixels.decode(tokens))


def test_the_original_checkpoint_of_the_pixel_decoder(tmp_path: Path) -> None:
    save(tmp_path)
    before = Chameleon.load("a", tmp_path, harness.options())
    vq = load_file(tmp_path / "vqgan.safetensors")
    (tmp_path / "vqgan.safetensors").unlink()
    torch.save({"state_dict": vq, "epoch": 3}, tmp_path / "vqgan.ckpt")
    after = Chameleon.load("a", tmp_path, harness.options())
    tokens = torch.randint(0, CODES, (1, 4, 4))
    assert before.pixels.decode(tokens).equal(after.pixels.decode(tokens))


def lumina(folder: Path, **values: object) -> tuple[ChameleonForConditionalGeneration, LuminaMGPT]:
    theirs = save(folder, **values)
    return theirs, LuminaMGPT.load("lumina", folder, harness.options())


def small(model: LuminaMGPT) -> LuminaMGPT:
    """The tests' pictures are small, and so is their vocabulary."""
    model.sizes = ((16, 16), (16, 32), (24, 8))
    model.CELL, model.SIZE = 8, 300
    return model


@pytest.mark.parametrize("values", [{}, {"num_key_value_heads": 2}])
@pytest.mark.parametrize("size", [(16, 16), (16, 32), (24, 8)])
def test_lumina_rows_end_with_newlines(
    tmp_path: Path, values: dict[str, object], size: tuple[int, int]
) -> None:
    """The same decoder over prompt, size tokens and rows that end with a newline token."""
    theirs, ours = lumina(tmp_path, **values)
    small(ours)
    tokens = harness.prove(ours, reference(theirs), size=size)
    width = size[0] // 4
    for image in tokens:
        assert [t for i, t in enumerate(image) if (i + 1) % (width + 1) == 0] == [CODES] * (
            size[1] // 4
        )
        assert image.count(CODES) == size[1] // 4


def test_lumina_prompts_are_as_published(tmp_path: Path) -> None:
    """bos, text, sep, begin-of-image, cells of height and width; the unconditional one is the rest
    from begin-of-image on."""
    _, ours = lumina(tmp_path)
    words = vocabulary()
    grid = ours.grid_of((768, 768))
    assert (grid.height, grid.width, grid.row_tokens) == (192, 192, 1)  # 4 pixels per token here
    ids = ours.encode_prompt("a cat", grid)
    text = "Generate an image of 768x768 according to the following prompt:\na cat"
    body = harness.word_tokenizer(words, SPECIAL).encode(text).ids
    tail = (words["<reserved08706>"], words["<racm3:break>"], 8804 + 24, 8804 + 24)
    assert ids == (words["<s>"], *body, *tail)
    assert ours.unconditional_prompt(ids, grid) == tail[1:]


def test_lumina_sizes_are_those_of_its_training() -> None:
    sizes = lumina_sizes(512)
    assert sizes[0] == (512, 512)
    assert len(set(sizes)) == len(sizes)
    for width, height in sizes:
        assert width * height <= 512 * 512
        assert max(width, height) <= 4 * min(width, height)
    assert (1024, 256) in sizes
    assert (256, 1024) in sizes
