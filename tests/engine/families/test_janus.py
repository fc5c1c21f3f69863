"""Janus against transformers: prompts, logits, greedy pictures, pixels."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import JanusConfig, JanusForConditionalGeneration

from engine.models.janus import Janus
from tests.engine.families import harness

SPECIAL = ("<｜begin▁of▁sentence｜>", "<｜▁pad▁｜>", "<begin_of_image>", "<image_placeholder>")


def config(**text: object) -> JanusConfig:
    values = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 300,
        "max_position_embeddings": 256, "bos_token_id": 256, "pad_token_id": 257,
    }  # fmt: skip
    return JanusConfig(
        text_config=values | text,
        vision_config={
            "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4,
            "image_size": 16, "projection_dim": 64, "num_image_tokens": 16,
        },
        vq_config={
            "embed_dim": 8, "num_embeddings": 64, "latent_channels": 32, "base_channels": 32,
            "channel_multiplier": [1, 1, 2], "num_res_blocks": 1, "projection_dim": 64,
            "image_token_embed_dim": 64,
        },
    )  # fmt: skip


def save(folder: Path, **text: object) -> JanusForConditionalGeneration:
    torch.manual_seed(0)
    model = JanusForConditionalGeneration(config(**text)).eval()
    for parameter in model.parameters():  # transformers starts biases and some tables at zero
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size=text.pop("shard", "5GB"))
    tokenizer = harness.word_tokenizer(harness.byte_vocabulary(), SPECIAL)
    harness.save_fast(
        tokenizer, folder, bos_token=SPECIAL[0], pad_token=SPECIAL[1], boi_token=SPECIAL[2]
    )
    return model


def reference(model: JanusForConditionalGeneration) -> harness.Reference:
    def logits(prompt: tuple[int, ...], tokens: list[int]) -> Tensor:
        with torch.inference_mode():
            words = model.get_input_embeddings()(torch.tensor([prompt]))
            image = model.prepare_embeddings_for_image_generation(torch.tensor([tokens[:-1]]))
            hidden = model.model.language_model(inputs_embeds=torch.cat([words, image], 1))
            last = hidden.last_hidden_state[0, len(prompt) - 1 :]
            return model.model.generation_head(last)

    return logits


@pytest.mark.parametrize(
    "text",
    [
        {},
        {"num_key_value_heads": 2, "rope_theta": 5e5},
        {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True, "head_dim": 32},
        {"tie_word_embeddings": True},
    ],
)
def test_pictures_are_those_of_transformers(tmp_path: Path, text: dict[str, object]) -> None:
    theirs = save(tmp_path, **text)
    ours = Janus.load("janus", tmp_path, harness.options())
    tokens = harness.prove(ours, reference(theirs))
    picture = torch.tensor(tokens)
    with torch.inference_mode():
        expected = theirs.model.vqmodel.decode(picture)
    got = ours.pixels.decode(ours.picture_tokens(picture, ours.grid))
    assert (got - expected).abs().max() <= 1e-4
