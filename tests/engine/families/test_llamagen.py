"""LlamaGen against an independent model in plain PyTorch, written from its paper (arXiv 2406.06525)
and the published layout: padded captions with a mask, interleaved rotary pairs, the whole prompt's
queries and keys rotated by zeros."""

import argparse
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.models.llamagen import LlamaGen
from engine.models.llamagen_files import convert, describe
from engine.weights import WeightError
from tests.engine.families import harness, vq_reference

CODES, CLASSES, CAPTION, T5_WIDTH = 64, 10, 48, 24


def tensors(mode: str, dim: int, heads: int, kv_heads: int, layers: int = 2) -> dict[str, Tensor]:
    """A checkpoint with the published names."""
    g = torch.Generator().manual_seed(0)
    head_dim, ffn = dim // heads, 96

    def matrix(outputs: int, inputs: int) -> Tensor:
        return torch.randn(outputs, inputs, generator=g) * inputs**-0.5

    def norm() -> Tensor:
        return 1 + 0.1 * torch.randn(dim, generator=g)

    w = {
        "tok_embeddings.weight": torch.randn(CODES, dim, generator=g),
        "norm.weight": norm(),
        "output.weight": matrix(CODES, dim) * 3,
    }
    if mode == "c2i":
        w["cls_embedding.embedding_table.weight"] = torch.randn(CLASSES + 1, dim, generator=g)
    else:
        w["cls_embedding.uncond_embedding"] = torch.randn(CAPTION, T5_WIDTH, generator=g)
        w["cls_embedding.cap_proj.fc1.weight"] = matrix(dim, T5_WIDTH) * 2
        w["cls_embedding.cap_proj.fc2.weight"] = matrix(dim, dim) * 2
    for i in range(layers):
        at = f"layers.{i}."
        w[at + "attention_norm.weight"], w[at + "ffn_norm.weight"] = norm(), norm()
        w[at + "attention.wqkv.weight"] = matrix((heads + 2 * kv_heads) * head_dim, dim) * 2
        w[at + "attention.wo.weight"] = matrix(dim, dim)
        w[at + "feed_forward.w1.weight"] = matrix(ffn, dim)
        w[at + "feed_forward.w3.weight"] = matrix(ffn, dim)
        w[at + "feed_forward.w2.weight"] = matrix(dim, ffn)
    return w


def rotate(x: Tensor, side: int, prompt: int) -> Tensor:
    """x [T, heads, D]: pairs (2i, 2i + 1) as complex numbers; the first half of the pairs turns
    with the row, the second with the column; the prompt is multiplied by zero."""
    head_dim = x.shape[-1]
    t = torch.arange(len(x) - prompt)
    frequency = 10000.0 ** (-torch.arange(0, head_dim // 2, 2) / (head_dim // 2))
    angle = torch.cat([(t // side)[:, None] * frequency, (t % side)[:, None] * frequency], 1)
    turn = torch.polar(torch.ones_like(angle), angle)
    turn = torch.cat([torch.zeros(prompt, head_dim // 2), turn])
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turn[:, None]).flatten(-2)


def forward(
    w: dict[str, Tensor], condition: Tensor, valid: Tensor, tokens: list[int], heads: int, side: int
) -> Tensor:
    """Logits of every visual token. condition: [P, d]; `valid` [P]: which of it is no padding."""
    prompt, dim = condition.shape
    x = torch.cat([condition, w["tok_embeddings.weight"][tokens[:-1]]])
    count, head_dim = len(x), dim // heads
    allowed = torch.ones(count, count).tril().bool()
    allowed[:, :prompt] &= valid
    allowed |= torch.eye(count).bool()
    for i in range(len([k for k in w if k.endswith("attention_norm.weight")])):
        at = f"layers.{i}."
        h = F.rms_norm(x, (dim,), w[at + "attention_norm.weight"], 1e-5)
        q, k, v = (h @ w[at + "attention.wqkv.weight"].T).unflatten(1, (-1, head_dim)).split(
            [heads, *2 * [(len(w[at + "attention.wqkv.weight"]) // head_dim - heads) // 2]], 1
        )  # fmt: skip
        q, k = rotate(q, side, prompt), rotate(k, side, prompt)
        k, v = (y.repeat_interleave(heads // y.shape[1], 1) for y in (k, v))
        score = torch.einsum("qhd,khd->hqk", q, k) / head_dim**0.5
        p = score.masked_fill(~allowed, -torch.inf).softmax(-1)
        x = x + torch.einsum("hqk,khd->qhd", p, v).flatten(1) @ w[at + "attention.wo.weight"].T
        h = F.rms_norm(x, (dim,), w[at + "ffn_norm.weight"], 1e-5)
        gate = F.silu(h @ w[at + "feed_forward.w1.weight"].T)
        x = (
            x
            + (gate * (h @ w[at + "feed_forward.w3.weight"].T)) @ w[at + "feed_forward.w2.weight"].T
        )
    return F.rms_norm(x[prompt - 1 :], (dim,), w["norm.weight"], 1e-5) @ w["output.weight"].T


VQ = {"codes": CODES, "code_dim": 8, "latent": 32, "base": 32}
GEOMETRIES = [(64, 4, 4), (64, 2, 1), (160, 8, 4)]


def save(
    folder: Path,
    mode: str,
    dim: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    multiplier: tuple[int, ...] = (1, 1, 2, 2, 4),
    side: int = 4,
) -> dict[str, Tensor]:
    """The published files, converted into `folder`."""
    w = tensors(mode, dim, heads, kv_heads)
    vq = vq_reference.llamagen(**VQ, multiplier=multiplier).state_dict()
    vq = vq | {"encoder.conv_in.weight": torch.zeros(1), "quant_conv.weight": torch.zeros(1)}
    vq["quantize.codebook_used"] = torch.zeros(8)
    source = folder / "published"
    source.mkdir(parents=True)
    torch.save({"model": w, "args": argparse.Namespace(gpt_model="X")}, source / "gpt.pt")
    torch.save({"model": vq, "steps": 3}, source / "vq.pt")
    t5 = None
    if mode == "t2i":
        t5 = source / "t5"
        save_t5(t5)
    size = side * 2 ** (len(multiplier) - 1)
    convert(source / "gpt.pt", source / "vq.pt", folder, size, t5, heads)
    return w


def save_t5(folder: Path) -> None:
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    T5EncoderModel(
        T5Config(
            vocab_size=300, d_model=T5_WIDTH, d_kv=8, d_ff=32, num_layers=2, num_heads=3,
            feed_forward_proj="gated-gelu",
        )
    ).save_pretrained(folder)  # fmt: skip
    tokenizer = harness.word_tokenizer(harness.byte_vocabulary(), ("</s>", "<pad>"))
    harness.end_with(tokenizer, "</s>")
    harness.save_fast(tokenizer, folder, eos_token="</s>", pad_token="<pad>")


@pytest.mark.parametrize(("dim", "heads", "kv_heads"), GEOMETRIES)
@pytest.mark.parametrize("multiplier", [(1, 1, 2, 2, 4), (1, 2, 2, 4)])
def test_classes(
    tmp_path: Path, dim: int, heads: int, kv_heads: int, multiplier: tuple[int, ...]
) -> None:
    """VQ-16 and VQ-8; head dims of 16, 32 and 20."""
    w = save(tmp_path, "c2i", dim, heads, kv_heads, multiplier)
    ours = LlamaGen.load("llamagen", tmp_path, harness.options())
    assert ours.pixel_size == ((64, 64) if len(multiplier) == 5 else (32, 32))

    def reference(prompt: tuple[int, ...], tokens: list[int]) -> Tensor:
        condition = w["cls_embedding.embedding_table.weight"][list(prompt)]
        return forward(w, condition, torch.ones(1).bool(), tokens, heads, 4)

    tokens = torch.tensor(harness.prove(ours, reference, ("3", "class 7", "0")))
    assert ours.unconditional_prompt((3,), ours.grid) == (CLASSES,)
    vq = vq_reference.llamagen(**VQ, multiplier=multiplier)
    picture = ours.picture_tokens(tokens, ours.grid)
    assert (ours.pixels.decode(picture) - vq(picture)).abs().max() <= 1e-4


@pytest.mark.parametrize(("dim", "heads", "kv_heads"), GEOMETRIES[:2])
def test_captions(tmp_path: Path, dim: int, heads: int, kv_heads: int) -> None:
    """The reference pads captions on the left to 48 tokens and masks the padding away, for both
    sequences of a guidance pair."""
    from transformers import T5EncoderModel

    w = save(tmp_path, "t2i", dim, heads, kv_heads)
    ours = LlamaGen.load("llamagen", tmp_path, harness.options())
    t5 = T5EncoderModel.from_pretrained(tmp_path / "published" / "t5").eval()

    def reference(prompt: tuple[int, ...], tokens: list[int]) -> Tensor:
        valid = torch.arange(CAPTION) >= CAPTION - len(prompt)
        with torch.inference_mode():
            if prompt[0] >= 300:  # unconditional
                states = w["cls_embedding.uncond_embedding"]
            else:
                ids = torch.tensor([[*prompt, *[0] * (CAPTION - len(prompt))]])
                mask = (torch.arange(CAPTION) < len(prompt))[None].long()
                states = t5(input_ids=ids, attention_mask=mask).last_hidden_state[0]
                states = torch.cat([states[len(prompt) :], states[: len(prompt)]])
                states = states * valid[:, None]
        hidden = F.gelu(states @ w["cls_embedding.cap_proj.fc1.weight"].T, approximate="tanh")
        condition = hidden @ w["cls_embedding.cap_proj.fc2.weight"].T
        return forward(w, condition, valid, tokens, heads, 4)

    harness.prove(ours, reference)
    assert ours.encode_prompt("  A  Cat ", ours.grid) == ours.encode_prompt("a cat", ours.grid)


def test_what_a_class_is(tmp_path: Path) -> None:
    save(tmp_path, "c2i")
    ours = LlamaGen.load("llamagen", tmp_path, harness.options())
    for wrong in ("a cat", "10", "-1", "3.5"):
        with pytest.raises(ValueError, match=r"class number in 0\.\.9"):
            ours.encode_prompt(wrong, ours.grid)


def test_captions_need_their_encoder(tmp_path: Path) -> None:
    import shutil

    save(tmp_path, "t2i")
    shutil.rmtree(tmp_path / "t5")
    with pytest.raises(WeightError, match="no T5 encoder"):
        LlamaGen.load("llamagen", tmp_path, harness.options())


def test_other_files_are_refused(tmp_path: Path) -> None:
    w = tensors("c2i", 64, 4, 4)
    vq = vq_reference.llamagen(**VQ, multiplier=(1, 1, 2, 2, 4)).state_dict()
    with pytest.raises(WeightError, match="width 64"):
        describe(w, vq, None)
    with pytest.raises(WeightError, match="tok_embeddings"):
        describe({}, vq, None)
    evil = tmp_path / "evil.pt"
    torch.save({"model": {"a": Path("x")}}, evil)
    with pytest.raises(WeightError, match="read safely"):
        convert(evil, evil, tmp_path / "out", 64)
    assert not (tmp_path / "out").exists()
