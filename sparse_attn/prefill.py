"""Prefill: dense causal attention within each prompt, FlashAttention-2 for the GPU.

With the `flash-attn` package installed (extra `flash`) and tensors it can take, all prompts go in
one varlen call; otherwise torch's scaled_dot_product_attention runs prompt by prompt, whose flash
backend is the same kernel.
"""

import importlib
import importlib.util
from itertools import accumulate
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

PrefillBackend = Literal["flash-attn", "sdpa"]


def why_not_flash_attn(q: Float[Tensor, "M Hq D"]) -> str | None:
    """Why the flash-attn package cannot run this; None if it can."""
    if importlib.util.find_spec("flash_attn") is None:
        return "flash-attn is not installed (pip install 'bishop-serve[flash]')"
    if q.device.type != "cuda":
        return f"flash-attn needs a CUDA device, the tensors are on {q.device}"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"flash-attn needs fp16 or bf16, got {q.dtype}"
    if q.shape[-1] > 256 or q.shape[-1] % 8:
        return f"flash-attn needs a head_dim of at most 256 and a multiple of 8, got {q.shape[-1]}"
    return None


def choose(q: Float[Tensor, "M Hq D"]) -> PrefillBackend:
    """The backend that prefill uses for such tensors."""
    return "sdpa" if why_not_flash_attn(q) else "flash-attn"


def causal(
    q: Float[Tensor, "M Hq D"],
    k: Float[Tensor, "M H D"],
    v: Float[Tensor, "M H D"],
    lengths: list[int],
    backend: PrefillBackend | None = None,
) -> Float[Tensor, "M Hq D"]:
    """Causal attention within each of the prompts that lie one behind the other in the rows.

    lengths: tokens of each prompt, M in all. backend: None chooses (`choose`).
    Raises RuntimeError with the reason if flash-attn is asked for and cannot run.
    """
    if sum(lengths) != len(q):
        raise ValueError(f"prompts of {lengths} tokens do not make up {len(q)} rows")
    if (backend or choose(q)) == "sdpa":
        return _sdpa(q, k, v, lengths)
    reason = why_not_flash_attn(q)
    if reason is not None:
        raise RuntimeError(reason)
    return _flash_attn(q, k, v, lengths)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """Prompt by prompt, so that the result of one does not depend on the others."""
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    return torch.cat([_sdpa_one(*part) for part in parts])


def _sdpa_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return out[0].transpose(0, 1)


def _flash_attn(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    package = importlib.import_module("flash_attn")
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=q.device)
    out: Tensor = package.flash_attn_varlen_func(
        q, k, v, bounds, bounds, max(lengths), max(lengths), causal=True
    )
    return out
