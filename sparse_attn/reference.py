"""The slow reference of every operator: plain loops over keys, in float64 where it matters.

It is a backend like any other (`backend="reference"`), so that a whole run can be repeated with it.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_attn.cache import LayerCache
from sparse_attn.policy import Batch, ReadPlan, read_keys


def append(
    k: Float[Tensor, "B H D"], v: Float[Tensor, "B H D"], cache: LayerCache, batch: Batch
) -> None:
    """Write the key and value of each sequence's position into its ring (or anchors)."""
    table = cache.table
    for b, (slot, t) in enumerate(zip(batch.slots.tolist(), batch.positions.tolist(), strict=True)):
        for h in range(len(table.rings)):
            entry = slot + int(table.offsets[h]) + visual_entry(cache, h, t)
            cache.arena[entry, 0] = k[b, h].to(cache.arena.dtype)
            cache.arena[entry, 1] = v[b, h].to(cache.arena.dtype)


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
        at = slot + offset + start
        cache.arena[at : at + len(k), 0] = k[:, h].to(cache.arena.dtype)
        cache.arena[at : at + len(k), 1] = v[:, h].to(cache.arena.dtype)


def visual_entry(cache: LayerCache, head: int, key: int) -> int:
    """Entry of a visual key within its head's region (see `CacheLayout.visual_entry`)."""
    table = cache.table
    if key < table.anchors:
        return table.prompt + key
    return table.prompt + table.anchors + (key - table.anchors) % int(table.rings[head])


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
            out[b, heads], w = _attend(q[b, heads], cache, batch, b, h, keys, scale)
            if weights is not None:
                weights[b, h] = 0
                weights[b, h, torch.tensor(keys, dtype=torch.long)] = w.to(weights.dtype)
    return out


def _attend(
    q: Tensor, cache: LayerCache, batch: Batch, b: int, h: int, keys: list[int], scale: float
) -> tuple[Tensor, Tensor]:
    base = int(batch.slots[b]) + int(cache.table.offsets[h])
    prompt = int(batch.prompts[b])
    at = [base + i for i in range(prompt)] + [base + visual_entry(cache, h, j) for j in keys]
    entries = cache.arena[torch.tensor(at, device=cache.arena.device)].double()
    score = (q.double() @ entries[:, 0].T) * scale
    p = score.softmax(-1)
    return (p @ entries[:, 1]).to(q.dtype), p[:, prompt:].sum(0)
