"""Janus against transformers: prompts, logits, greedy pictures, pixels."""

import json
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoTokenizer,
    JanusConfig,
    JanusForConditionalGeneration,
    JanusImageProcessor,
    JanusProcessor,
)

from engine.models.janus import Janus
from engine.models.vqgan import VQGANConfig
from engine.weights import WeightError
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


def test_shards_and_half_precision(tmp_path: Path) -> None:
    """Shards in bf16 give what the whole gives in bf16, converted to fp32 on the way."""
    theirs = save(tmp_path / "whole").bfloat16()
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "whole" / name, tmp_path / "shards")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 5
    ours = Janus.load("janus", tmp_path / "shards", harness.options())
    harness.prove(ours, reference(theirs.float()))


def test_generate_of_transformers_draws_the_same_picture(tmp_path: Path) -> None:
    """Its own loop: processor, guidance, pads in the unconditional prompt, static cache."""
    theirs = save(tmp_path)
    ours = Janus.load("janus", tmp_path, harness.options())
    settings = theirs.generation_config
    settings.bos_token_id, settings.pad_token_id, settings.do_sample = 256, 257, False
    settings.generation_kwargs = {"boi_token_id": 258}
    settings.guidance_scale = harness.GREEDY.guidance_scale
    for prompt in harness.PROMPTS:
        ids = processed(tmp_path, prompt)
        assert tuple(ids[0].tolist()) == ours.encode_prompt(prompt, ours.grid)
        with torch.inference_mode():
            expected = theirs.generate(
                ids, attention_mask=torch.ones_like(ids), generation_mode="image", use_cache=True
            )
            pixels = theirs.decode_image_tokens(expected)
        [image] = harness.draw(harness.engine_of(ours), [harness.request(prompt)])
        assert list(image.tokens) == expected[0].tolist()
        half = [0.5, 0.5, 0.5]  # as the published preprocessor_config.json says
        want = JanusImageProcessor(image_mean=half, image_std=half).postprocess(
            list(pixels.float().permute(0, 3, 1, 2)), return_tensors="pt"
        )["pixel_values"]  # fmt: skip
        got = torch.from_numpy(image.pixels).permute(2, 0, 1).int()
        assert (got - want[0].int()).abs().max() <= 1  # transformers cuts where we round


def test_the_padding_is_generation_configs_or_a_token_of_its_own(tmp_path: Path) -> None:
    """Not the tokenizer's pad_token, which the original repositories set to end-of-sentence."""
    save(tmp_path)
    values = json.loads((tmp_path / "tokenizer_config.json").read_text())
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(values | {"pad_token": "<image_placeholder>"}))
    generation = tmp_path / "generation_config.json"

    def pads(**said: object) -> set[int]:
        generation.write_text(json.dumps(said))
        model = Janus.load("janus", tmp_path, harness.options())
        prompt = model.encode_prompt("a", model.grid)
        return set(model.unconditional_prompt(prompt, model.grid)) - {prompt[0], prompt[-1]}

    assert pads() == {257}
    assert pads(pad_token_id=7) == {7}
    assert pads(generation_kwargs={"boi_token_id": 258}, bos_token_id=256) == {257}


def processed(folder: Path, prompt: str) -> Tensor:
    """What transformers' processor makes of a prompt with the published chat template."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.image_token, tokenizer.eoi_token = SPECIAL[3], "<end_of_image>"
    processor = JanusProcessor(JanusImageProcessor(), tokenizer, chat_template=CHAT)
    chat = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
    text = processor.apply_chat_template(chat, add_generation_prompt=True)
    ids: Tensor = processor(text=SPECIAL[0] + text, generation_mode="image", return_tensors="pt")[
        "input_ids"
    ]
    return ids


CHAT = (
    "{%for message in messages%}<|User|>: {{message['content'][0]['text'].strip()}}\n\n"
    "{%endfor%}{%if add_generation_prompt%}<|Assistant|>:{%endif%}"
)
"""The part of the published template that one message of text uses."""

ORIGINAL_NAMES = (
    ("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head."),
    ("model.vqmodel.decoder.up.", "gen_vision_model.decoder.conv_blocks."),
    (".block.", ".res."), ("model.vqmodel.decoder.mid.block_1.", "gen_vision_model.decoder.mid.0."),
    ("model.vqmodel.decoder.mid.attn_1.", "gen_vision_model.decoder.mid.1."),
    ("model.vqmodel.decoder.mid.block_2.", "gen_vision_model.decoder.mid.2."),
    ("model.vqmodel.", "gen_vision_model."), ("model.generation_embeddings.", "gen_embed."),
    ("model.generation_aligner.fc1.", "gen_aligner.layers.0."),
    ("model.generation_aligner.hidden_layers.0.", "gen_aligner.layers.2."),
    ("model.generation_head.proj_out.", "gen_head.output_mlp_projector."),
    ("model.generation_head.vision_head.", "gen_head.vision_head."),
    ("model.vision_model.", "vision_model."), ("model.aligner.", "aligner."),
)  # fmt: skip


def test_original_checkpoints_load(tmp_path: Path) -> None:
    """deepseek-ai's layout: other names, torch's format, another config.json."""
    theirs = save(tmp_path / "hf", hidden_size=64)
    new = Janus.load("janus", tmp_path / "hf", harness.options())
    renamed = {}
    for name, tensor in theirs.state_dict().items():
        for a, b in ORIGINAL_NAMES:
            name = name.replace(a, b)
        renamed[name] = tensor
    folder = tmp_path / "original"
    shutil.copytree(tmp_path / "hf", folder)
    (folder / "model.safetensors").unlink()
    torch.save(renamed, folder / "pytorch_model.bin")
    text = json.loads((folder / "config.json").read_text())["text_config"]
    params = {"image_token_size": 64, "n_embed": 8}
    config = {
        "architectures": ["MultiModalityCausalLM"], "language_config": text,
        "gen_vision_config": {"cls": "VQ-16", "params": params},
        "gen_head_config": {"params": {"image_token_embed": 64, "n_embed": 64}},
        "gen_aligner_config": {"params": {"depth": 2, "input_dim": 8, "n_embed": 64}},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    sizes = VQGANConfig(codes=64, latent_channels=32, base_channels=32,
                        channel_multiplier=(1, 1, 2), res_blocks=1)  # fmt: skip
    with pytest.raises(WeightError, match="vqmodel"):  # VQ-16 is larger than the test's
        Janus.load("janus", folder, harness.options())
    with patch("engine.models.janus.VQGANConfig", lambda **_: sizes):
        old = Janus.load("janus", folder, harness.options())
    hidden = torch.randn(3, 64)
    assert old.logits(hidden).equal(new.logits(hidden))
    tokens = torch.randint(0, 64, (1, 4, 4))
    assert old.pixels.decode(tokens).equal(new.pixels.decode(tokens))
    visual = torch.arange(5)
    assert old.embed_visual(visual, visual, old.grid).equal(
        new.embed_visual(visual, visual, old.grid)
    )
    assert old.pixel_size == (96, 96)
