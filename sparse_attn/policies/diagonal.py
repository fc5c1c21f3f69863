"""`diagonal`: the policy of "Understanding and Exploiting Diagonal Attention Sparsity in
Autoregressive Image Generation" (arXiv 2609.19702), per head and per image.

The paper keeps a skip set S of key positions inside a window W_t of the last N_r visual keys and
shifts S by one each step. Seen as *offsets* t - j nothing moves: a shifted skip set is the same
set of offsets. So the state is the list of offsets a head still reads, N_att of them:

1. t < N_att - 1: attend everything. Places of the list that reach before the picture are empty.
2. N_att - 1 <= t < N_r - 1: attend the list; the key with the smallest weight joins the skip set,
   and its place is taken by offset t + 1, which the window gains with the next step.
3. From then on the list stays as it is, and key t - N_r is evicted.

With sinks the same runs on the keys behind them (t counts from the first key that is no sink).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_attn.budget import anchor_count
from sparse_attn.geometry import Grid
from sparse_attn.policy import Batch, Heads, ReadPlan, ReadPolicy


class Diagonal(ReadPolicy):
    """Read set: N_att learned offsets per head (sinks included). Resident set: last N_r keys
    and the sinks. A key dies N_r steps after it was written.

    sparsity: share of the N visual keys that a query never reads; N_att = ceil((1 - s) * N).
    recent: N_r; the paper does not state it, the default is four times N_att.
    sink: leading visual keys kept and read for good (the paper's `+sink4` has 4).
    anchors: the same by another name, a number or "first_row"; the larger of the two counts.
    """

    name = "diagonal"

    def __init__(
        self,
        grid: Grid,
        heads: Heads,
        sparsity: float,
        recent: int | None = None,
        sink: int = 0,
        anchors: int | str = 0,
    ) -> None:
        super().__init__(grid, heads, sparsity, max(sink, anchor_count(grid, anchors)))
        self.kept = self.beside_anchors
        self.recent = min(grid.tokens, 4 * self.budget if recent is None else recent)
        if self.recent < self.kept:
            raise ValueError(f"recent (N_r) must be at least {self.kept}, got {recent}")
        self._windows: dict[torch.device, Tensor] = {}

    def _forget(self) -> None:
        self._windows = {}

    def ring(self, layer: int) -> tuple[int, ...]:
        return (min(self.recent, self.grid.tokens - self.anchors),) * self.heads.kv_heads

    def new_state(self, rows: int, device: torch.device) -> Tensor:
        """Kept offsets, int16 [rows, layers, H, kept, 2], at first the most recent keys."""
        shape = (rows, self.heads.layers, self.heads.kv_heads, self.kept, 2)
        state = torch.zeros(shape, dtype=torch.int16, device=device)
        state[..., 0] = torch.arange(self.kept, dtype=torch.int16, device=device)
        return state

    def plan(self, layer: int, state: Tensor | None, device: torch.device) -> ReadPlan:
        if state is None:
            raise ValueError("diagonal needs its state: pass what new_state returned")
        if device not in self._windows:
            self._windows[device] = torch.zeros(
                self.heads.kv_heads, dtype=torch.int32, device=device
            )
        window = self._windows[device]
        return ReadPlan(window, state[:, layer], self.anchors, self.grid.stride, self.selecting)

    @property
    def selecting(self) -> tuple[int, int]:
        """Positions [lo, hi) whose step adds a key to the skip set (phase 2)."""
        return self.anchors + self.kept - 1, self.anchors + self.recent - 1

    @property
    def learns(self) -> bool:
        return self.recent > self.kept

    def update(
        self, layer: int, state: Tensor | None, batch: Batch, weights: Float[Tensor, "B H N"]
    ) -> None:
        assert state is not None
        lo, hi = self.selecting
        due = ((batch.positions >= lo) & (batch.positions < hi)).nonzero()[:, 0]
        rows, t = batch.rows[due], batch.positions[due].long()
        offsets = state[rows, layer, :, :, 0].long()
        read = weights[due].gather(2, t[:, None, None] - offsets)
        weakest = read == read.amin(2, keepdim=True)
        place = offsets.masked_fill(~weakest, -1).argmax(2, keepdim=True)
        new = (t + 1 - self.anchors)[:, None, None].expand_as(place)
        state[rows, layer, :, :, 0] = offsets.scatter(2, place, new).to(state.dtype)

    def read_total(self, t: int) -> int:
        return min(t + 1, self.kept + self.anchors) * self.heads.layers * self.heads.kv_heads

    def read_bound(self) -> int:
        return self.kept + self.anchors
