"""`torch.ops.bishop.*`: the compiled operators, their fakes, and why they cannot run if so."""

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_attn.cache import LayerCache
from sparse_attn.policy import Batch, ReadPlan

try:
    from sparse_attn import _C
except ImportError as error:
    _failure: str | None = str(error)
else:
    _failure = None


def available() -> bool:
    """Whether the compiled operators are there."""
    return _failure is None


def why_not() -> str | None:
    """Why the compiled operators cannot run and what to do; None if they can."""
    if _failure is None:
        return None
    return (
        f"the extension sparse_attn._C is not built or does not load ({_failure}): run "
        '`make build`, or choose backend="reference"'
    )


def built() -> dict[str, str]:
    """What was built: `cpu` is the instruction set, `cuda` says "built" or why not."""
    _require()
    return {"cpu": _C.cpu, "cuda": _C.cuda}


def append(
    k: Float[Tensor, "B H D"], v: Float[Tensor, "B H D"], cache: LayerCache, batch: Batch
) -> None:
    """Store the key and value (fp32) of each sequence's position in its ring or anchors.

    Raises RuntimeError if the operators are not built, or naming the argument that does not fit.
    """
    _require()
    torch.ops.bishop.append(k, v, *_cache(cache), batch.slots, batch.positions)


def decode(
    q: Float[Tensor, "B Hq D"], cache: LayerCache, plan: ReadPlan, batch: Batch, scale: float
) -> Float[Tensor, "B Hq D"]:
    """Attention of one fp32 query per sequence over its prompt and the plan's reads.

    Where the plan asks for it, `plan.offsets` is updated in place. The result of a sequence does
    not depend on the others, nor on the number of threads. Raises as `append` does.
    """
    _require()
    where = (batch.slots, batch.positions, batch.prompts, batch.rows)
    reads = (plan.window, plan.offsets, plan.anchors, plan.stride, scale)
    out: Tensor
    if plan.select is None or plan.offsets is None:
        out = torch.ops.bishop.decode(q, *_cache(cache), *where, *reads)
    else:
        out = torch.ops.bishop.decode_select(q, *_cache(cache), *where, *reads, *plan.select)
    return out


def _cache(cache: LayerCache) -> tuple[Tensor, Tensor, Tensor, int, int]:
    table = cache.table
    return cache.arena, table.offsets, table.rings, table.prompt, table.anchors


def _require() -> None:
    reason = why_not()
    if reason is not None:
        raise RuntimeError(reason)


def _no_result(*_args: object) -> None:
    return None


def _like_queries(q: Tensor, *_args: object) -> Tensor:
    return q.new_empty(q.shape)


if available():
    torch.library.register_fake("bishop::append", _no_result)
    torch.library.register_fake("bishop::decode", _like_queries)
    torch.library.register_fake("bishop::decode_select", _like_queries)
