"""Prefill attention, and the adapter of the flash-attn package."""

import sys
from itertools import pairwise
from types import ModuleType

import pytest
import torch

from sparse_attn import prefill

LENGTHS = [1, 7, 33]


def tensors(group: int = 1) -> list[torch.Tensor]:
    rows = sum(LENGTHS)
    return [torch.randn(rows, 4 * (group if i == 0 else 1), 16) for i in range(3)]


def by_definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of one prompt in float64, head by head and query by query."""
    out = torch.empty_like(q, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        for t in range(len(q)):
            keys = k[: t + 1, head // group].double()
            weights = (keys @ q[t, head].double() * q.shape[-1] ** -0.5).softmax(0)
            out[t, head] = weights @ v[: t + 1, head // group].double()
    return out


@pytest.mark.parametrize("group", [1, 2])
def test_prompts_attend_within_themselves(group: int) -> None:
    q, k, v = tensors(group)
    out = prefill.causal(q, k, v, LENGTHS)
    parts = zip(*(x.split(LENGTHS) for x in (q, k, v)), strict=True)
    expected = torch.cat([by_definition(*part) for part in parts])
    assert torch.allclose(out.double(), expected, atol=1e-5)


def test_a_prompt_does_not_depend_on_the_others() -> None:
    q, k, v = tensors()
    together = prefill.causal(q, k, v, LENGTHS)[1:8]
    assert prefill.causal(q[1:8], k[1:8], v[1:8], [7]).equal(together)


def test_lengths_must_make_up_the_rows() -> None:
    with pytest.raises(ValueError, match="do not make up 41 rows"):
        prefill.causal(*tensors(), [1, 2])


def test_flash_attn_says_why_it_cannot_run() -> None:
    q, k, v = tensors()
    assert prefill.choose(q) == "sdpa"
    with pytest.raises(RuntimeError, match="flash-attn"):
        prefill.causal(q, k, v, LENGTHS, backend="flash-attn")


def test_flash_attn_gets_what_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the package with its documented signature, computing by definition."""

    def flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, causal=False):  # type: ignore[no-untyped-def]
        assert causal
        assert cu_q.dtype == torch.int32
        assert cu_q.equal(cu_k)
        assert max_q == max_k == max(LENGTHS)
        bounds = cu_q.tolist()
        parts = [slice(a, b) for a, b in pairwise(bounds)]
        return torch.cat([by_definition(q[p], k[p], v[p]) for p in parts]).to(q.dtype)

    package = ModuleType("flash_attn")
    package.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setattr(prefill, "why_not_flash_attn", lambda q: None)
    q, k, v = tensors()
    assert prefill.choose(q) == "flash-attn"
    out = prefill.causal(q, k, v, LENGTHS)
    assert torch.allclose(out, prefill.causal(q, k, v, LENGTHS, backend="sdpa"), atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flash-attn needs a CUDA device")
def test_flash_attn_equals_sdpa_on_the_gpu() -> None:
    pytest.importorskip("flash_attn", reason="flash-attn is not installed")
    q, k, v = (x.cuda().bfloat16() for x in tensors())
    flash = prefill.causal(q, k, v, LENGTHS, backend="flash-attn")
    assert torch.allclose(flash, prefill.causal(q, k, v, LENGTHS, backend="sdpa"), atol=2e-2)
