"""`ReadPolicy`: the contract between attention policies, the cache and the kernels.

A policy answers four questions for each (layer, KV head): which visual keys does the query at
position t read, which are still stored, when does a key die, and how does a kernel find the
reads. The prompt is always read and is not a policy's business.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Self

import torch
from jaxtyping import Bool, Float, Int16, Int32, Int64
from torch import Tensor

from sparse_attn.budget import anchor_count, read_budget
from sparse_attn.geometry import Grid
from sparse_attn.index import Pick


@dataclass(frozen=True, slots=True)
class Heads:
    """The (layer, KV head) pairs a policy decides for."""

    layers: int
    kv_heads: int


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The sequences of one launch.

    slots: int64 [B], first entry of each sequence's cache in the arena.
    positions: int32 [B], visual position of the query (and of the key it writes).
    prompts: int32 [B], prompt tokens of each sequence.
    rows: int64 [B], row of each sequence in the policy's state.
    """

    slots: Int64[Tensor, "B"]
    positions: Int32[Tensor, "B"]
    prompts: Int32[Tensor, "B"]
    rows: Int64[Tensor, "B"]


@dataclass(frozen=True, slots=True, eq=False)
class ReadPlan:
    """What a decode kernel needs to find the reads of one layer, in closed form.

    The query at position t of sequence b reads, for KV head h, the prompt and the keys
      {j < anchors, j <= t}                               the anchors,
      {max(anchors, t - window[h] + 1) .. t}              the recent window,
      {t - o >= anchors : (o, dc) in offsets[row of b, h], 0 <= column(t) - dc < stride}.
    Offsets never point into the window (o >= window[h]) and never repeat, so that no key is
    read twice.

    window: int32 [H], keys counted from the query's own; 0 where offsets say everything.
    offsets: int16 [R, H, n, 2] of (linear offset, dc), or None. R = 1: one table for all
        sequences; else sequence b uses row `Batch.rows[b]`. Unused places hold (`UNUSED`, 0).
        dc is 0 where the row edge does not matter.
    anchors: how many leading visual keys are always read.
    stride: positions per picture row, for the row-edge mask.
    select: positions [lo, hi) whose step also replaces, per head and in place, the offset of the
        smallest attention weight (summed over the head's query group; ties: the largest offset)
        by t + 1 - anchors; None where nothing is learnt.
    held: [R, H, n], the key that each entry of a head's ring holds, -1 where it is free; None
        where key j lies at entry (j - anchors) mod ring. Every held key up to t is read. Policies
        that evict by score need it; the reference backend alone knows it.
    """

    window: Int32[Tensor, "H"]
    offsets: Int16[Tensor, "R H n 2"] | None
    anchors: int
    stride: int
    select: tuple[int, int] | None = None
    held: Float[Tensor, "R H n"] | None = None

    def to(self, device: torch.device) -> "ReadPlan":
        """The same plan with its tensors on `device`."""
        offsets = None if self.offsets is None else self.offsets.to(device)
        return replace(self, window=self.window.to(device), offsets=offsets)


UNUSED = 32767
"""Linear offset of an unused place: farther back than any picture reaches."""


class ReadPolicy(ABC):
    """Decides the read set and the resident set of every KV head of a model on one grid.

    Subclasses are immutable; what they learn while an image is drawn lives in a state tensor
    that the engine owns, one row per sequence (`new_state`), so that images stay independent.
    """

    name: str

    def __init__(
        self, grid: Grid, heads: Heads, sparsity: float = 0.0, anchors: int | str = 0
    ) -> None:
        """sparsity s: reads of a head are at most `budget` = ceil((1 - s) * N), anchors included,
        on average over the heads of the model. anchors: leading visual keys that are never
        evicted, a number or "first_row".
        """
        self.grid = grid
        self.heads = heads
        self.sparsity = sparsity
        self.budget = read_budget(grid, sparsity)
        self.anchors = anchor_count(grid, anchors)

    def of_heads(self, first: int, count: int) -> Self:
        """The same policy for KV heads first .. first + count - 1 alone: what a rank of tensor
        parallelism asks."""
        part = copy(self)
        part.heads = Heads(self.heads.layers, count)
        part._forget()
        return part

    def _forget(self) -> None:
        """Drop what was worked out for other heads."""

    @abstractmethod
    def ring(self, layer: int) -> tuple[int, ...]:
        """Entries stored for each KV head besides the anchors (the ring of recent keys)."""

    @abstractmethod
    def plan(self, layer: int, state: Tensor | None, device: torch.device) -> ReadPlan:
        """The reads of `layer` in the form the kernels take; `state` as from `new_state`."""

    def new_state(self, rows: int, device: torch.device) -> Tensor | None:
        """State of `rows` fresh sequences: a tensor [rows, layers, ...], or None."""
        return None

    def update(
        self, layer: int, state: Tensor | None, batch: Batch, weights: Float[Tensor, "B H N"]
    ) -> None:
        """Learn from one step, in place; the reference of what `ReadPlan.select` asks of a
        kernel. `weights`: attention weights of every visual key, summed over the query heads of
        each KV head, 0 where a key was not read."""

    def dies_at(self, layer: int, head: int, key: int) -> int:
        """First query position that no longer finds `key` stored (N if it never dies)."""
        if key < self.anchors:
            return self.grid.tokens
        return min(key + self.ring(layer)[head], self.grid.tokens)

    def resident(
        self, layer: int, head: int, t: int, state: Tensor | None = None, row: int = 0
    ) -> list[int]:
        """Visual keys stored for the query at position t, its own included, ascending; for a
        policy whose evictions depend on the image, those of row `row` of its state."""
        return [j for j in range(t + 1) if self.dies_at(layer, head, j) > t]

    def reads(self, layer: int, state: Tensor | None, batch: Batch) -> Bool[Tensor, "B H N"]:
        """Reference mask of the read set, derived key by key from `plan`."""
        return mask_of(self.plan(layer, state, batch.positions.device), batch, self.grid)

    @property
    def index_bytes(self) -> int:
        """Bytes of index stored beside each visual key of a head; 0 without an index."""
        return 0

    def pick(self, layer: int, device: torch.device, scale: float) -> Pick | None:
        """How the reads are picked where they depend on the query; None where they do not."""
        return None

    def extra_read_bytes(self, t: int, entry_bytes: int) -> int:
        """Bytes read by the query at position t to find its keys, over all layers and heads."""
        return 0

    @property
    def learns(self) -> bool:
        """Whether `update` changes anything (the kernel must then report arg-min weights)."""
        return False

    @property
    def beside_anchors(self) -> int:
        """Reads left for a head besides the anchors. Raises ValueError if none are."""
        if self.budget <= self.anchors:
            raise ValueError(
                f"sparsity {self.sparsity} allows {self.budget} reads on a {self.grid} grid, which "
                f"{self.anchors} anchors use up; lower the sparsity or keep fewer anchors"
            )
        return self.budget - self.anchors

    @abstractmethod
    def read_total(self, t: int) -> int:
        """Visual keys read by the query at position t, summed over layers and KV heads."""

    def read_bound(self) -> int:
        """Most visual keys one head reads for one query."""
        return self.grid.tokens

    def resident_entries(self) -> Sequence[Sequence[int]]:
        """Stored visual entries per layer and KV head, anchors included."""
        return [
            [min(self.anchors + r, self.grid.tokens) for r in self.ring(layer)]
            for layer in range(self.heads.layers)
        ]


def read_keys(plan: ReadPlan, row: int, head: int, t: int) -> list[int]:
    """Visual keys the query at position t reads, ascending: what a `ReadPlan` means."""
    keys = set(range(min(plan.anchors, t + 1)))
    keys.update(range(max(plan.anchors, t - int(plan.window[head]) + 1), t + 1))
    if plan.offsets is not None:
        table = plan.offsets[row if len(plan.offsets) > 1 else 0, head]
        keys.update(_offset_keys(table.tolist(), t, plan))
    if plan.held is not None:
        keys.update(int(key) for key in plan.held[row, head].tolist() if 0 <= key <= t)
    return sorted(keys)


def _offset_keys(offsets: list[list[int]], t: int, plan: ReadPlan) -> list[int]:
    column = t % plan.stride
    return [
        t - linear
        for linear, dc in offsets
        if t - linear >= plan.anchors and 0 <= column - dc < plan.stride
    ]


def mask_of(plan: ReadPlan, batch: Batch, grid: Grid) -> Bool[Tensor, "B H N"]:
    """The read set of a plan as a mask over all visual keys; slow and obviously right."""
    shape = (len(batch.positions), len(plan.window), grid.tokens)
    mask = torch.zeros(shape, dtype=torch.bool, device=batch.positions.device)
    rows, positions = batch.rows.tolist(), batch.positions.tolist()
    for b, (row, t) in enumerate(zip(rows, positions, strict=True)):
        for h in range(len(plan.window)):
            mask[b, h, read_keys(plan, row, h, t)] = True
    return mask
