"""`alisa`: sparse window attention (Zhao et al., "ALISA", section 4), recent and heavy keys.

The paper moves what it does not read to the CPU or computes it again; here it is dropped. A key
that is not read gets no weight, so the paper too rarely takes one back.
"""

import torch
from torch import Tensor

from sparse_attn.geometry import Grid
from sparse_attn.policies.scored import ScoredPolicy
from sparse_attn.policy import Heads


class Alisa(ScoredPolicy):
    """Keeps half of its budget for the most recent keys and half for those with the largest sum of
    attention over the last `horizon` steps. See `ScoredPolicy`."""

    name = "alisa"

    def __init__(
        self,
        grid: Grid,
        heads: Heads,
        sparsity: float,
        horizon: int = 8,
        anchors: int | str = 0,
    ) -> None:
        super().__init__(grid, heads, sparsity, anchors)
        if horizon < 1:
            raise ValueError(f"horizon must be at least 1 step, got {horizon}")
        self.columns = horizon

    @property
    def protected(self) -> int:
        return self.capacity // 2

    def accumulate(self, columns: Tensor, weights: Tensor) -> Tensor:
        return torch.cat([columns[..., 1:], weights[..., None]], -1)

    def score(self, columns: Tensor) -> Tensor:
        return columns.sum(-1)
