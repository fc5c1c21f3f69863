"""Eviction by attention scores, as language models do it. For study: reference backend only."""

from abc import abstractmethod

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from sparse_attn.geometry import Grid
from sparse_attn.policy import Batch, Heads, ReadPlan, ReadPolicy


class ScoredPolicy(ReadPolicy):
    """Read set = resident set: the anchors and, per head and image, the n best keys beside them.
    When the ring of n keys is full, the next key takes the place of the one with the lowest score
    (ties: the oldest); which key dies when depends on the image.

    The state is float32 [rows, layers, H, n, 1 + columns]: the key held at each entry (-1: none)
    and what its score is made of. The place of key t + 1 is settled by the update of step t.
    """

    columns = 1

    def __init__(self, grid: Grid, heads: Heads, sparsity: float, anchors: int | str = 0) -> None:
        super().__init__(grid, heads, sparsity, anchors)
        self.capacity = self.beside_anchors
        self._windows: dict[torch.device, Tensor] = {}

    @property
    def protected(self) -> int:
        """Most recent keys that are never evicted."""
        return 0

    @abstractmethod
    def accumulate(
        self, columns: Float[Tensor, "B H n c"], weights: Float[Tensor, "B H n"]
    ) -> Float[Tensor, "B H n c"]:
        """The columns after a step that gave each held key an attention weight."""

    @abstractmethod
    def score(self, columns: Float[Tensor, "B H n c"]) -> Float[Tensor, "B H n"]:
        """What a held key is worth."""

    @property
    def learns(self) -> bool:
        return True

    def ring(self, layer: int) -> tuple[int, ...]:
        return (self.capacity,) * self.heads.kv_heads

    def new_state(self, rows: int, device: torch.device) -> Tensor:
        shape = (rows, self.heads.layers, self.heads.kv_heads, self.capacity, 1 + self.columns)
        state = torch.zeros(shape, device=device)
        state[..., 0] = -1
        state[..., 0, 0] = self.anchors
        return state

    def plan(self, layer: int, state: Tensor | None, device: torch.device) -> ReadPlan:
        if state is None:
            raise ValueError(f"{self.name} needs its state: pass what new_state returned")
        window = torch.zeros(self.heads.kv_heads, dtype=torch.int32, device=device)
        held = state[:, layer, :, :, 0]
        return ReadPlan(window, None, self.anchors, self.grid.stride, held=held)

    def update(
        self, layer: int, state: Tensor | None, batch: Batch, weights: Float[Tensor, "B H N"]
    ) -> None:
        assert state is not None
        now, t = state[batch.rows, layer], batch.positions.long()[:, None, None]
        held = now[..., 0].long()
        there = (held >= 0) & (held <= t)
        seen = weights.gather(2, held.clamp(0, self.grid.tokens - 1)) * there
        now[..., 1:] = self.accumulate(now[..., 1:], seen.float())
        place = self._place(held, self.score(now[..., 1:]), there, t)
        coming = (t + 1 > self.anchors)[..., None]
        fresh = torch.zeros_like(now[..., :1, :])
        fresh[..., 0] = t + 1
        index = place[..., None].expand_as(fresh)
        state[batch.rows, layer] = torch.where(coming, now.scatter(2, index, fresh), now)

    def _place(
        self,
        held: Int64[Tensor, "B H n"],
        score: Float[Tensor, "B H n"],
        there: Bool[Tensor, "B H n"],
        t: Int64[Tensor, "B 1 1"],
    ) -> Int64[Tensor, "B H 1"]:
        """Entry of the next key: a free one, or that of the worst key that may go."""
        score = score.masked_fill(there & (held > t + 1 - self.protected), torch.inf)
        score = score.masked_fill(held < 0, -torch.inf)
        worst = score == score.amin(2, keepdim=True)
        return held.masked_fill(~worst, self.grid.tokens).argmin(2, keepdim=True)

    def dies_at(self, layer: int, head: int, key: int) -> int:
        raise ValueError(f"when a key of {self.name} dies depends on the image")

    def resident(
        self, layer: int, head: int, t: int, state: Tensor | None = None, row: int = 0
    ) -> list[int]:
        if state is None:
            raise ValueError(f"what {self.name} keeps depends on the image: pass its state")
        held = {int(key) for key in state[row, layer, head, :, 0].tolist() if 0 <= key <= t}
        return sorted(held | set(range(min(self.anchors, t + 1))))

    def read_total(self, t: int) -> int:
        return min(t + 1, self.budget) * self.heads.layers * self.heads.kv_heads

    def read_bound(self) -> int:
        return self.budget
