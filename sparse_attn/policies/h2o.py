"""`h2o`: heavy hitters (Zhang et al., "H2O: Heavy-Hitter Oracle", algorithm 1), with decay."""

from torch import Tensor

from sparse_attn.geometry import Grid
from sparse_attn.policies.scored import ScoredPolicy
from sparse_attn.policy import Heads


class H2O(ScoredPolicy):
    """Keeps half of its budget for the most recent keys and half for those that got the most
    attention so far. See `ScoredPolicy` for read set, resident set and death.

    decay: factor on the sums of earlier steps; 1 is the paper, .95 was better on images.
    """

    name = "h2o"

    def __init__(
        self,
        grid: Grid,
        heads: Heads,
        sparsity: float,
        decay: float = 1.0,
        anchors: int | str = 0,
    ) -> None:
        super().__init__(grid, heads, sparsity, anchors)
        if not 0 < decay <= 1:
            raise ValueError(f"decay must lie in (0, 1], got {decay}")
        self.decay = decay

    @property
    def protected(self) -> int:
        return self.capacity // 2

    def accumulate(self, columns: Tensor, weights: Tensor) -> Tensor:
        return columns * self.decay + weights[..., None]

    def score(self, columns: Tensor) -> Tensor:
        return columns[..., 0]
