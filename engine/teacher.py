"""Teacher forcing: finished pictures through a model in one pass, with attention of one's own."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int64
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.models.base import SubBatchRun, VisualModel
from sparse_attn.format import KVFormat
from sparse_attn.geometry import Grid
from sparse_attn.policy import ReadPolicy
from sparse_attn.teacher import read_sets


@dataclass(frozen=True, eq=False)
class Pictures:
    """Finished pictures. prompts: [B, P] prompt tokens, padded at the end. tokens: [B, N].
    lengths: [B], prompt tokens of each; None where all have P."""

    prompts: Int64[Tensor, "B P"]
    tokens: Int64[Tensor, "B N"]
    lengths: Int64[Tensor, "B"] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, part: slice) -> "Pictures":
        lengths = None if self.lengths is None else self.lengths[part]
        return Pictures(self.prompts[part], self.tokens[part], lengths)

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], tokens: Int64[Tensor, "B N"]) -> "Pictures":
        """Of prompts of any lengths."""
        lengths = torch.tensor([len(p) for p in prompts])
        padded = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        return cls(padded, tokens, None if (lengths == lengths[0]).all() else lengths)

    @classmethod
    def load(cls, path: Path) -> "Pictures":
        """From a safetensors file. Raises ValueError if it holds no pictures."""
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"cannot read the pictures in {path}: {error}") from error
        if set(tensors) - {"lengths"} != {"prompts", "tokens"}:
            raise ValueError(f"{path} holds {sorted(tensors)}, not prompts and tokens")
        return cls(**{name: tensor.long() for name, tensor in tensors.items()})

    def save(self, path: Path) -> None:
        tensors = {"prompts": self.prompts.int(), "tokens": self.tokens.int()}
        if self.lengths is not None:
            tensors["lengths"] = self.lengths.int()
        save_file(tensors, path)

    def split(self, size: int) -> list["Pictures"]:
        """Parts of at most `size` neighbours whose prompts have one length, in order."""
        if self.lengths is None:
            parts = zip(self.prompts.split(size), self.tokens.split(size), strict=True)
            return [Pictures(p, t) for p, t in parts]
        lengths, parts_, start = self.lengths.tolist(), list[Pictures](), 0
        for end in range(1, len(self) + 1):
            if end == len(self) or end - start == size or lengths[end] != lengths[start]:
                prompts = self.prompts[start:end, : lengths[start]]
                parts_.append(Pictures(prompts, self.tokens[start:end]))
                start = end
        return parts_


class Attend(Protocol):
    """Attention over whole sequences: [B, P + N - 1, heads, D] each; `prompt` is P."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, prompt: int) -> Tensor: ...


def token_loss(
    model: VisualModel, grid: Grid, pictures: Pictures, attend: Attend
) -> Float[Tensor, "B N"]:
    """Negative log-likelihood of every visual token, nats; 0 for forced end-of-row tokens."""
    loss = [
        torch.nn.functional.nll_loss(p, t.clamp_max(_last(model)), reduction="none")
        for p, t in zip(
            log_probabilities(model, grid, pictures, attend), pictures.tokens, strict=True
        )
    ]
    return torch.stack(loss).masked_fill(forced_tokens(model, grid), 0.0)


def log_probabilities(
    model: VisualModel, grid: Grid, pictures: Pictures, attend: Attend
) -> Iterator[Float[Tensor, "N V"]]:
    """What the model expects of each visual token, picture by picture, nats, fp32."""
    with torch.inference_mode():
        hidden = _forward(model, grid, pictures, attend)
        for h in hidden:
            yield model.logits(h).float().log_softmax(-1)


def forced_tokens(model: VisualModel, grid: Grid) -> Bool[Tensor, "N"]:
    """Where an end-of-row token stands whatever the model expects."""
    return torch.tensor([model.forced_token(grid, t) is not None for t in range(grid.tokens)])


def _last(model: VisualModel) -> int:
    return model.shape.image_vocab - 1


def _forward(model: VisualModel, grid: Grid, pictures: Pictures, attend: Attend) -> Tensor:
    """Hidden states [B, N, d] that predict the visual tokens."""
    count, prompt = pictures.prompts.shape
    length = prompt + grid.tokens - 1
    positions = torch.arange(grid.tokens - 1)
    angles = [
        torch.cat(parts)
        for parts in zip(
            model.rotary_prompt(prompt),
            model.rotary_visual(positions, torch.full_like(positions, prompt), grid),
            strict=True,
        )
    ]
    rows = [
        torch.cat([model.embed_prompt(p), model.embed_visual(t[:-1], positions, grid)])
        for p, t in zip(pictures.prompts, pictures.tokens, strict=True)
    ]

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (count, length)) for x in (q, k, v))
        return attend(layer, q, k, v, prompt).flatten(0, 1)

    cos, sin = (a.repeat(count, 1) for a in angles)
    run = SubBatchRun(torch.cat(rows), cos, sin, attention)
    for layer in range(model.shape.layers):
        model.run_layer(layer, run)
    hidden: Tensor = run.hidden.unflatten(0, (count, length))[:, prompt - 1 :]
    return hidden


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Bool[Tensor, "#B #H T T"]
) -> Float[Tensor, "B T Hq D"]:
    group = q.shape[2] // k.shape[2]
    if mask.shape[1] > 1:
        mask = mask.repeat_interleave(group, 1)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out: Tensor = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, enable_gqa=group > 1
    )
    return out.transpose(1, 2)


def whole_mask(visual: Bool[Tensor, "B H N N"], prompt: int) -> Bool[Tensor, "B H T T"]:
    """Causal within the prompt; visual queries read all of it and what the policy says."""
    n = visual.shape[-1]
    mask = torch.zeros(*visual.shape[:2], prompt + n, prompt + n, dtype=torch.bool)
    mask[..., :prompt, :prompt] = torch.ones(prompt, prompt).tril().bool()
    mask[..., prompt:, :prompt] = True
    mask[..., prompt:, prompt:] = visual
    return mask


class PolicyAttention:
    """What a policy and a KV format make of attention; counts the keys read.

    The prompt stays exact where the format is not a plain one: it is few and read by all.
    """

    def __init__(self, policy: ReadPolicy, format: KVFormat | None = None) -> None:
        self.policy, self.format = policy, format
        self.read, self.queries = 0.0, 0

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, prompt: int) -> Tensor:
        if self.format is not None:
            k, v = (
                torch.cat([x[:, :prompt], self.format.round_trip(x[:, prompt:])], 1) for x in (k, v)
            )
        visual = read_sets(
            self.policy, layer, q[:, prompt:], k[:, prompt:], k[:, :prompt], q.shape[-1] ** -0.5
        )
        self.read += float(visual.float().sum(-1).mean()) * len(q)
        self.queries += len(q)
        return masked_attention(q, k, v, whole_mask(visual, prompt))

    @property
    def reads(self) -> float:
        """Visual keys read per query and head, mean over pictures, positions, layers, heads."""
        return self.read / self.queries


def policy_loss(
    model: VisualModel,
    pictures: Pictures,
    policy: ReadPolicy,
    format: KVFormat | None = None,
    batch: int = 8,
) -> tuple[Float[Tensor, "B N"], float]:
    """Loss of every token under a policy, and the visual keys read per query and head."""
    attend = PolicyAttention(policy, format)
    losses = [token_loss(model, policy.grid, p, attend) for p in pictures.split(batch)]
    return torch.cat(losses), attend.reads


def encode_prompts(model: VisualModel, captions: Sequence[str], grid: Grid) -> Int64[Tensor, "B P"]:
    """Prompt tokens of captions. Raises ValueError if their lengths differ."""
    prompts = [model.encode_prompt(caption, grid) for caption in captions]
    if len({len(p) for p in prompts}) > 1:
        raise ValueError("teacher forcing needs prompts of one length")
    return torch.tensor(prompts)
