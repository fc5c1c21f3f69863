"""The slow reference of every operator: plain loops over keys, in float64 where it matters.

It is a backend like any other (`backend="reference"`), so that a whole run can be repeated with it.
"""

from collections.abc import Iterable

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from sparse_attn.cache import LayerCache
from sparse_attn.policy import Batch, ReadPlan, read_keys


def append(
    k: Float[Tensor, "B H D"],
    v: Float[Tensor, "B H D"],
    cache: LayerCache,
    batch: Batch,
    plan: ReadPlan | None = None,
) -> None:
    """Write the key and value of each sequence's position into its ring (or anchors); `plan` says
    where if the policy evicts by score."""
    table = cache.table
    for b, (slot, t) in enumerate(zip(batch.slots.tolist(), batch.positions.tolist(), strict=True)):
        row = int(batch.rows[b])
        at = [slot + e for e in visual_entries(cache, row, range(len(table.rings)), t, plan)]
        table.format.write(cache.arena, torch.tensor(at, device=cache.arena.device), k[b], v[b])


def append_prompt(
    k: Float[Tensor, "P H D"],
    v: Float[Tensor, "P H D"],
    cache: LayerCache,
    slot: int,
    start: int = 0,
) -> None:
    """Write prompt tokens `start`.. of one sequence into its prompt region."""
    if start + len(k) > cache.table.prompt:
        raise ValueError(
            f"prompt of {start + len(k)} tokens, but the cache holds {cache.table.prompt}"
        )
    for h, offset in enumerate(cache.table.offsets.tolist()):
        at = slot + offset + start + torch.arange(len(k), device=cache.arena.device)
        cache.table.format.write(cache.arena, at, k[:, h], v[:, h])


def visual_entries(
    cache: LayerCache, row: int, heads: Iterable[int], key: int, plan: ReadPlan | None
) -> list[int]:
    """Entries of one visual key in each of `heads`, from the start of the sequence's cache."""
    return [int(cache.table.offsets[h]) + visual_entry(cache, h, key, row, plan) for h in heads]


def visual_entry(
    cache: LayerCache, head: int, key: int, row: int = 0, plan: ReadPlan | None = None
) -> int:
    """Entry of a visual key within its head's region (see `CacheLayout.visual_entry`)."""
    table = cache.table
    if key < table.anchors:
        return table.prompt + key
    if plan is not None and plan.held is not None:
        place = plan.held[row, head].tolist().index(key)
    else:
        place = (key - table.anchors) % int(table.rings[head])
    return table.prompt + table.anchors + int(place)


def decode(
    q: Float[Tensor, "B Hq D"],
    cache: LayerCache,
    plan: ReadPlan,
    batch: Batch,
    scale: float,
    weights: Float[Tensor, "B H N"] | None = None,
) -> Float[Tensor, "B Hq D"]:
    """Attention of one query per sequence over its prompt and the plan's reads.

    Computed in float64 and returned in q's dtype. `weights`, where given, receives the attention
    weight of every visual key, summed over the query heads of each KV head.
    """
    out = torch.empty_like(q)
    group = q.shape[1] // len(cache.table.rings)
    for b, t in enumerate(batch.positions.tolist()):
        for h in range(len(cache.table.rings)):
            keys = read_keys(plan, int(batch.rows[b]), h, t)
            heads = slice(h * group, (h + 1) * group)
            entries = [visual_entry(cache, h, j, int(batch.rows[b]), plan) for j in keys]
            out[b, heads], w = _attend(q[b, heads], cache, batch, b, h, entries, scale)
            if weights is not None:
                weights[b, h] = 0
                weights[b, h, torch.tensor(keys, dtype=torch.long)] = w.to(weights.dtype)
    return out


def _attend(
    q: Tensor, cache: LayerCache, batch: Batch, b: int, h: int, visual: list[int], scale: float
) -> tuple[Tensor, Tensor]:
    base, prompt = int(batch.slots[b]) + int(cache.table.offsets[h]), int(batch.prompts[b])
    keys = [*range(prompt), *visual]
    at = torch.tensor(keys, dtype=torch.long, device=cache.arena.device) + base
    k, v = cache.table.format.read(cache.arena, at, q.shape[-1])
    p = (q.double() @ k.T * scale).softmax(-1)
    return (p @ v).to(q.dtype), p[:, prompt:].sum(0)


def linear(
    x: Float[Tensor, "M K"],
    weight: Shaped[Tensor, "N K"],
    scale: Float[Tensor, "N"] | None = None,
) -> Float[Tensor, "M N"]:
    """x W^T, in float64; an int8 weight has one scale per output row."""
    out = x.double() @ weight.double().T
    return (out if scale is None else out * scale.double()).to(x.dtype)


def rms_norm(
    x: Float[Tensor, "*M K"], weight: Float[Tensor, "K"], eps: float
) -> Float[Tensor, "*M K"]:
    """x / sqrt(mean(x^2) + eps) * weight, in float64."""
    wide = x.double()
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight).to(x.dtype)


def swiglu(gate_up: Float[Tensor, "M 2*F"]) -> Float[Tensor, "M F"]:
    """silu(gate) * up for rows [gate | up], in float64."""
    gate, up = gate_up.double().chunk(2, -1)
    return (gate * gate.sigmoid() * up).to(gate_up.dtype)


def qk_norm_rope(
    qkv: Float[Tensor, "M (Hq+2*H)*D"],
    q_norm: Float[Tensor, "D"] | None,
    k_norm: Float[Tensor, "D"] | None,
    cos: Float[Tensor, "M D//2"],
    sin: Float[Tensor, "M D//2"],
    eps: float,
    heads: int,
    kv_heads: int,
) -> tuple[Float[Tensor, "M Hq D"], Float[Tensor, "M H D"], Float[Tensor, "M H D"]]:
    """RMS norm of every q and k head, then the half-split rotation, in float64."""
    q, k, v = qkv.view(len(qkv), heads + 2 * kv_heads, -1).split((heads, kv_heads, kv_heads), 1)
    return _norm_rope(q, q_norm, cos, sin, eps), _norm_rope(k, k_norm, cos, sin, eps), v.clone()


def _norm_rope(
    x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float
) -> Float[Tensor, "M H D"]:
    normed = x.double() if weight is None else rms_norm(x.double(), weight, eps)
    a, b = normed.chunk(2, -1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    return torch.cat([a * c - b * s, a * s + b * c], -1).to(x.dtype)
