"""GLM-Image's autoregressive stage against transformers' own generation loop."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import (
    GlmImageConfig,
    GlmImageForConditionalGeneration,
    LogitsProcessor,
    LogitsProcessorList,
)
from transformers.models.glm_image.processing_glm_image import GlmImageProcessor

from engine.models import glm_image
from engine.models.glm_image import GlmImage, Stages, whole_rotation
from sparse_attn.attention import Backend
from sparse_attn.geometry import Grid
from tests.engine.families import harness

CODES = 64
SPECIAL = ("<|dit_token_16384|>", "<sop>", "<eop>", "<|image|>")
SMALL = ((128, 128), (96, 128), (160, 96))


def vocabulary() -> dict[str, int]:
    """Image tokens first, then start and end of image, as published."""
    words = {f"<|dit_token_{i}|>": i for i in range(CODES)}
    words |= {SPECIAL[0]: CODES, "<|dit_token_16385|>": CODES + 1}
    words |= harness.byte_vocabulary(CODES + 2)
    for name in SPECIAL[1:]:
        words[name] = len(words)
    return words


def save(folder: Path, **text: object) -> GlmImageForConditionalGeneration:
    torch.manual_seed(0)
    values = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 400,
        "vision_vocab_size": 80, "pad_token_id": 399, "eos_token_id": CODES + 1,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    }  # fmt: skip
    config = GlmImageConfig(
        text_config=values | text,
        vision_config={
            "depth": 1, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "image_size": 32,
            "intermediate_size": 32,
        },
        vq_config={"num_embeddings": CODES, "embed_dim": 16, "latent_channels": 32},
        image_start_token_id=CODES,
        image_end_token_id=CODES + 1,
        image_token_id=399,
    )  # fmt: skip
    model = GlmImageForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer = harness.word_tokenizer(vocabulary(), [*SPECIAL, "<|dit_token_16385|>"])
    harness.save_fast(
        tokenizer, folder, bos_token=SPECIAL[0], grid_bos_token="<sop>", grid_eos_token="<eop>"
    )
    return model


def load(folder: Path, backend: Backend | None = None) -> GlmImage:
    """With pictures of a few tokens: a square preview has 2 x 2."""
    with patch.multiple(glm_image, SIZES=SMALL, PREVIEW=2):
        model = GlmImage.load("glm", folder, harness.options(backend))
        small = {size: Stages.of(size) for size in SMALL}
    model.stages = {s.grid: s for s in small.values()}.__getitem__  # type: ignore[method-assign]

    def grid_of(size: tuple[int, int]) -> Grid:
        if size not in small:
            raise model._refuse_size(size)
        return small[size].grid

    model.grid_of = grid_of  # type: ignore[method-assign]
    return model


class Forced(LogitsProcessor):
    """Lets generation draw the given tokens and no others."""

    def __init__(self, tokens: list[int], prompt: int) -> None:
        self.tokens, self.prompt = tokens, prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token = self.tokens[input_ids.shape[1] - self.prompt]
        return torch.full_like(scores, -torch.inf).index_fill_(1, torch.tensor([token]), 0.0)


def reference(model: GlmImageForConditionalGeneration, stages: Stages) -> harness.Reference:
    """Every step's logits from `generate`, which knows the positions of both pictures itself."""
    grids = torch.tensor([[1, *stages.final], [1, *stages.preview]])

    def logits(prompt: tuple[int, ...], tokens: list[int]) -> Tensor:
        model.model.rope_deltas = None
        out = model.generate(
            torch.tensor([prompt]), image_grid_thw=grids, images_per_sample=torch.tensor([2]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=len(tokens), min_new_tokens=len(tokens), do_sample=False,
            logits_processor=LogitsProcessorList([Forced(tokens, len(prompt))]),
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        assert out.sequences[0, len(prompt) :].tolist() == tokens
        return torch.cat(out.logits)[:, :CODES]

    return logits


PARTIAL = {
    "rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2, 1],
    "partial_rotary_factor": 0.5,
}  # fmt: skip


@pytest.mark.parametrize("size", SMALL)
@pytest.mark.parametrize(
    "text", [{}, {"rope_parameters": PARTIAL, "num_key_value_heads": 1}, {"attention_bias": False}]
)
def test_tokens_are_those_of_transformers(
    tmp_path: Path, text: dict[str, object], size: tuple[int, int]
) -> None:
    theirs = save(tmp_path, **text)
    ours = load(tmp_path)
    stages = ours.stages(ours.grid_of(size))
    assert stages.final == (size[1] // 32, size[0] // 32)
    tokens = harness.prove(ours, reference(theirs, stages), size=size)
    picture = ours.picture_tokens(torch.tensor(tokens), stages.grid)
    assert picture.flatten(1).tolist() == [list(t[stages.first :]) for t in tokens]


def test_prompts_are_those_of_the_processor(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, GlmImageImageProcessor

    save(tmp_path)
    ours = GlmImage.load("glm", tmp_path, harness.options())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.image_token = SPECIAL[3]
    processor = GlmImageProcessor(GlmImageImageProcessor(), tokenizer)
    for width, height in ours.sizes:
        values = {"target_h": height, "target_w": width}
        expected = processor(text="a cat", **values)
        grid = ours.grid_of((width, height))
        assert list(ours.encode_prompt("a cat", grid)) == list(expected["input_ids"][0])
        stages = ours.stages(grid)
        assert expected["image_grid_thw"].tolist() == [[1, *stages.final], [1, *stages.preview]]
        assert grid.tokens == stages.first + stages.final[0] * stages.final[1]


def test_the_chat_template_of_the_folder_is_used(tmp_path: Path) -> None:
    save(tmp_path)
    plain = GlmImage.load("glm", tmp_path, harness.options())
    template = "[{% for m in messages %}{{ m['content'][0]['text'] }}{% endfor %}]"
    (tmp_path / "chat_template.jinja").write_text(template)
    framed = GlmImage.load("glm", tmp_path, harness.options())
    assert framed.encode_prompt("x", framed.grid) == plain.encode_prompt("[x]", plain.grid)


def test_grids_tell_sizes_apart() -> None:
    grids = [Stages.of(size).grid for size in glm_image.SIZES]
    assert len(set(grids)) == len(grids)
    assert Stages.of((1024, 1024)).grid == Grid(8 + 32, 32)


def test_a_partial_rotation_is_a_whole_one() -> None:
    rows = torch.arange(16.0)
    assert whole_rotation(rows, 8, 8).equal(rows)
    assert whole_rotation(rows, 8, 4).tolist()[:8] == [0, 1, 4, 5, 2, 3, 6, 7]
