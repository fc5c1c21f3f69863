"""Policies whose reads depend on the position alone: one plan per layer, made once."""

from abc import abstractmethod
from functools import cached_property

import torch
from torch import Tensor

from sparse_attn.geometry import Grid
from sparse_attn.masks import read_counts
from sparse_attn.policy import Heads, ReadPlan, ReadPolicy


class StaticPolicy(ReadPolicy):
    """Keeps the plan of each layer on each device, so that a step builds no tensor."""

    def __init__(
        self, grid: Grid, heads: Heads, sparsity: float = 0.0, anchors: int | str = 0
    ) -> None:
        super().__init__(grid, heads, sparsity, anchors)
        self._plans: dict[tuple[int, torch.device], ReadPlan] = {}

    def _forget(self) -> None:
        self._plans = {}
        self.__dict__.pop("_read_totals", None)

    @abstractmethod
    def layer_plan(self, layer: int) -> ReadPlan:
        """The reads of `layer`, on the CPU."""

    def plan(self, layer: int, state: Tensor | None, device: torch.device) -> ReadPlan:
        key = (layer, device)
        if key not in self._plans:
            self._plans[key] = self.layer_plan(layer).to(device)
        return self._plans[key]

    def uniform(self, window: int) -> ReadPlan:
        """The plan of heads that all read the anchors and the last `window` keys."""
        windows = torch.full((self.heads.kv_heads,), window, dtype=torch.int32)
        return ReadPlan(windows, None, self.anchors, self.grid.stride)

    @cached_property
    def _read_totals(self) -> list[int]:
        totals = torch.zeros(self.grid.tokens, dtype=torch.int64)
        for layer in range(self.heads.layers):
            totals += read_counts(self.layer_plan(layer), self.grid.tokens).sum(1)
        return [int(n) for n in totals]

    def read_total(self, t: int) -> int:
        return self._read_totals[t]
