"""Windows of unequal size: where a key is missed least, it is dropped first."""

import torch
from jaxtyping import Float
from torch import Tensor


def shared_windows(
    lost: Float[Tensor, "L H W"], keys: int, share: int = 1, smallest: int = 2
) -> list[tuple[int, ...]]:
    """Windows that lose the least attention mass in all, `keys` on average over the heads.

    lost: mass outside a window of w keys, w = 0..N; it falls with w. `share` neighbouring heads
    get the same window; none is below `smallest`. Every window lies on the convex hull of its
    head's curve (Lagrangian relaxation); what that leaves of the budget is not spread.
    """
    layers, heads, size = lost.shape
    if heads % share:
        raise ValueError(f"{heads} heads cannot share by {share}")
    curves = lost.double().view(layers, heads // share, share, size).sum(2).flatten(0, 1)
    windows = _within(curves, keys * len(curves), min(smallest, size - 1))
    per_head = windows.view(layers, heads // share, 1).expand(-1, -1, share).flatten(1)
    return [tuple(int(w) for w in layer) for layer in per_head]


def _within(curves: Float[Tensor, "n W"], total: int, smallest: int) -> Tensor:
    """Bisection over the price of a key."""
    sizes = torch.arange(curves.shape[1], dtype=torch.float64)
    low, high = 0.0, float(curves.max()) + 1.0
    result = torch.full((len(curves),), smallest)
    for _ in range(60):
        price = (low + high) / 2
        cost = curves + price * sizes
        cost[:, :smallest] = torch.inf
        best = cost.argmin(1)
        if int(best.sum()) > total:
            low = price
        else:
            high, result = price, best
    return result
