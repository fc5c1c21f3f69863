"""The slow reference of picking keys by an index: plain loops, scores in float64."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from sparse_attn.cache import LayerCache
from sparse_attn.index import IndexLayer, Pick, best, shared_scores
from sparse_attn.policy import UNUSED, Batch, ReadPlan
from sparse_attn.reference import visual_entry


def index_select(
    q: Float[Tensor, "B Hq D"], cache: LayerCache, plan: ReadPlan, batch: Batch, pick: Pick
) -> None:
    """Index each sequence's own key, as it is stored, then pick the reads of its query.

    Writes the linear offsets of the picked keys into `plan.offsets`, best first. Scores are
    computed in float64.
    """
    write_index(cache, plan, batch, pick.index)
    for b in range(len(batch.positions)):
        for first in range(0, len(cache.table.rings), pick.share):
            _pick(q, cache, plan, batch, b, range(first, first + pick.share), pick)


def write_index(cache: LayerCache, plan: ReadPlan, batch: Batch, index: IndexLayer) -> None:
    """Index the key of each sequence's position, as it is stored."""
    index = index.double()
    for b in range(len(batch.positions)):
        for h in range(len(cache.table.rings)):
            _write_index(cache, plan, batch, b, h, index)


def _index_bytes(
    cache: LayerCache, plan: ReadPlan, batch: Batch, b: int, h: int, keys: list[int], size: int
) -> Int64[Tensor, "n size"]:
    """Addresses of the index of keys of one head."""
    table = cache.table
    slot = int(batch.slots[b]) * table.format.entry_bytes(table.head_dim)
    places = [visual_entry(cache, h, j, int(batch.rows[b]), plan) - table.prompt for j in keys]
    first = torch.tensor(places) * size + slot + int(table.index_offsets[h])
    return first[:, None] + torch.arange(size)


def _write_index(
    cache: LayerCache, plan: ReadPlan, batch: Batch, b: int, h: int, index: IndexLayer
) -> None:
    t = int(batch.positions[b])
    k, _ = _entries(cache, plan, batch, b, h, [t])
    code = index.head(h).encode(k[:, None], torch.tensor([t]))[:, 0]
    cache.memory[_index_bytes(cache, plan, batch, b, h, [t], index.key_bytes)] = code


def _entries(
    cache: LayerCache, plan: ReadPlan, batch: Batch, b: int, h: int, keys: list[int]
) -> tuple[Tensor, Tensor]:
    """Keys and values of visual keys of one head, float64."""
    base = int(batch.slots[b]) + int(cache.table.offsets[h])
    at = [base + visual_entry(cache, h, j, int(batch.rows[b]), plan) for j in keys]
    return cache.table.format.read(cache.arena, torch.tensor(at), cache.table.head_dim)


def _pick(
    q: Tensor, cache: LayerCache, plan: ReadPlan, batch: Batch, b: int, heads: range, pick: Pick
) -> None:
    t, row = int(batch.positions[b]), int(batch.rows[b])
    assert plan.offsets is not None
    keys = _pickable(cache, heads, t, int(plan.window[heads[0]]))
    group = q.shape[1] // len(cache.table.rings)
    queries = {h: q[b, h * group : (h + 1) * group].double() for h in heads}

    def scores(keys: list[int], exact: bool) -> Tensor:
        rows = []
        for h in heads:
            if exact:
                k, _ = _entries(cache, plan, batch, b, h, keys)
            else:
                where = _index_bytes(cache, plan, batch, b, h, keys, pick.index.key_bytes)
                codes = cache.memory[where][:, None]
                k = pick.index.head(h).double().decode(codes, torch.tensor(keys))[:, 0]
            rows.append(queries[h] @ k.T * pick.scale)
        return shared_scores(torch.cat(rows))

    chosen = torch.tensor(keys, dtype=torch.long)
    if pick.candidates and keys:
        chosen = best(scores(keys, False), chosen, pick.candidates)[0].sort().values
    if keys:
        chosen = best(scores(chosen.tolist(), bool(pick.candidates)), chosen, pick.picks)[0]
    table = plan.offsets[row, heads.start : heads.stop]
    table[:, :, 0], table[:, :, 1] = UNUSED, 0
    table[:, : len(chosen), 0] = (t - chosen).to(table.dtype)


def _pickable(cache: LayerCache, heads: range, t: int, recent: int) -> list[int]:
    """Keys older than the last `recent` that every one of the heads still stores, ascending."""
    table = cache.table
    ring = min(int(table.rings[h]) for h in heads)
    return [j for j in range(t - recent + 1) if j < table.anchors or j > t - ring]
