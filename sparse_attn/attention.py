"""The one door to attention: `append` and `decode` on a chosen backend."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_attn import index_reference, ops, reference
from sparse_attn.cache import LayerCache
from sparse_attn.index import Pick
from sparse_attn.policy import Batch, ReadPlan, ReadPolicy

Backend = Literal["native", "reference"]
_STUDY = (
    "this policy evicts by attention scores, which is for study, and runs on the reference "
    'backend only: choose backend="reference" or another policy'
)


def why_not(policy: ReadPolicy, backend: Backend) -> str | None:
    """Why `policy` cannot run on `backend` and what to choose instead; None if it can."""
    if backend == "reference" or not policy.learns:
        return None
    cpu = torch.device("cpu")
    plan = policy.plan(0, policy.new_state(1, cpu), cpu)
    return _STUDY if plan.held is not None or plan.select is None else None


def append(
    k: Float[Tensor, "B H D"],
    v: Float[Tensor, "B H D"],
    cache: LayerCache,
    batch: Batch,
    backend: Backend = "native",
    *,
    plan: ReadPlan | None = None,
) -> None:
    """Store the key and value of each sequence's current position, evicting what they replace.

    plan: the reads of the layer, needed where the policy chooses what to evict (`ReadPlan.held`).
    """
    if backend == "reference":
        reference.append(k, v, cache, batch, plan)
    elif plan is not None and plan.held is not None:
        raise RuntimeError(_STUDY)
    else:
        ops.append(k, v, cache, batch)


def decode(
    q: Float[Tensor, "B Hq D"],
    cache: LayerCache,
    policy: ReadPolicy,
    plan: ReadPlan,
    batch: Batch,
    scale: float,
    *,
    layer: int,
    state: Tensor | None = None,
    backend: Backend = "native",
) -> Float[Tensor, "B Hq D"]:
    """One query per sequence against its prompt and the keys that `policy` reads.

    A policy that learns gets its state updated in place. Raises RuntimeError with the reason if
    the native backend cannot run this (which shape, what to change).
    """
    pick = policy.pick(layer, q.device, scale)
    if pick is not None:
        _index_select(q, cache, plan, batch, pick, backend)
    if backend == "native":
        if policy.learns and plan.select is None:
            raise RuntimeError(_STUDY)
        return ops.decode(q, cache, plan, batch, scale)
    if not policy.learns:
        return reference.decode(q, cache, plan, batch, scale)
    weights = q.new_zeros(q.shape[0], policy.heads.kv_heads, policy.grid.tokens)
    out = reference.decode(q, cache, plan, batch, scale, weights)
    policy.update(layer, state, batch, weights)
    return out


def _index_select(
    q: Tensor, cache: LayerCache, plan: ReadPlan, batch: Batch, pick: Pick, backend: Backend
) -> None:
    if backend == "reference":
        index_reference.index_select(q, cache, plan, batch, pick)
    else:
        ops.index_select(q, cache, plan, batch, pick)
