"""`torch.ops.bishop.*`: the compiled operators, their fakes, and why they cannot run if so."""

from jaxtyping import Float
from torch import Tensor

from sparse_attn.cache import LayerCache
from sparse_attn.policy import Batch, ReadPlan


def why_not() -> str | None:
    return "not built"


def append(
    k: Float[Tensor, "B H D"], v: Float[Tensor, "B H D"], cache: LayerCache, batch: Batch
) -> None:
    raise NotImplementedError


def decode(
    q: Float[Tensor, "B Hq D"], cache: LayerCache, plan: ReadPlan, batch: Batch, scale: float
) -> Float[Tensor, "B Hq D"]:
    raise NotImplementedError
