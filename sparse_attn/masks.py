"""Read sets of many queries at once: the vectorised counterpart of `policy.read_keys`."""

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from sparse_attn.policy import ReadPlan


def valid_offsets(
    plan: ReadPlan, rows: Int64[Tensor, "B"], positions: Int64[Tensor, "B"]
) -> Bool[Tensor, "B H n"]:
    """Which places of the plan's offset table point at a key that is there."""
    assert plan.offsets is not None
    table = plan.offsets[rows if len(plan.offsets) > 1 else torch.zeros_like(rows)].long()
    t = positions[:, None, None]
    column = t % plan.stride - table[..., 1]
    return (t - table[..., 0] >= plan.anchors) & (column >= 0) & (column < plan.stride)


def read_masks(
    plan: ReadPlan, rows: Int64[Tensor, "B"], positions: Int64[Tensor, "B"], tokens: int
) -> Bool[Tensor, "B H N"]:
    """The read set of B queries as a mask over all `tokens` visual keys."""
    keys = torch.arange(tokens, device=positions.device)
    back = positions[:, None, None] - keys
    recent = back < plan.window.to(positions.device)[None, :, None]
    mask = (back >= 0) & (recent | (keys < plan.anchors))
    if plan.held is not None:
        held = plan.held[rows].long()
        mask = mask | _marked(held, (held >= 0) & (held <= positions[:, None, None]), tokens)
    if plan.offsets is None:
        return mask
    table = plan.offsets[rows if len(plan.offsets) > 1 else torch.zeros_like(rows)].long()
    key = positions[:, None, None] - table[..., 0]
    valid = valid_offsets(plan, rows, positions)
    return mask | _marked(key, valid, tokens)


def _marked(
    keys: Int64[Tensor, "B H n"], valid: Bool[Tensor, "B H n"], tokens: int
) -> Bool[Tensor, "B H N"]:
    mark = torch.zeros((*keys.shape[:2], tokens), dtype=torch.uint8, device=keys.device)
    mark.scatter_reduce_(2, keys.clamp(0, tokens - 1), valid.to(torch.uint8), "amax")
    return mark.bool()


def read_counts(plan: ReadPlan, tokens: int) -> Int64[Tensor, "N H"]:
    """Keys read by the query at each position, per head, of a plan that every sequence shares."""
    t = torch.arange(tokens)
    first = (t[:, None] - plan.window.cpu()[None] + 1).clamp_min(plan.anchors)
    count = (t[:, None] + 1 - first).clamp_min(0) + (t + 1).clamp_max(plan.anchors)[:, None]
    if plan.offsets is None or plan.offsets.shape[2] == 0:
        return count
    shared = torch.zeros_like(t)
    parts = [valid_offsets(plan, shared[p], p).sum(-1) for p in torch.split(t, 512)]
    return count + torch.cat(parts)
