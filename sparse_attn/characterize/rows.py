"""One step of attention, as the statistics take it."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

MASSES = (0.9, 0.95, 0.99)
"""Shares of the attention whose price in keys is measured."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Attention weights of one layer for the queries at one visual position t.

    prompt: [B, H, P], on the prompt. visual: [B, H, t + 1], on the visual keys 0..t.
    Both together sum to 1. B: pictures drawn together, H: query heads.
    """

    t: int
    prompt: Float[Tensor, "B H P"]
    visual: Float[Tensor, "B H n"]

    @property
    def all(self) -> Float[Tensor, "B H K"]:
        return torch.cat([self.prompt, self.visual], -1)


def entropy(weights: Float[Tensor, "*b n"]) -> Float[Tensor, "*b"]:
    """Shannon entropy in nats; 0 log 0 is 0."""
    return -torch.xlogy(weights, weights).sum(-1)


def density_for(weights: Float[Tensor, "*b n"], mass: float) -> Float[Tensor, "*b"]:
    """Smallest share of the n keys that holds `mass` of the weight."""
    total = weights.sum(-1, keepdim=True).clamp_min(1e-30)
    held = (weights / total).sort(-1, descending=True).values.cumsum(-1)
    # a rounding error must not ask for one key more
    needed = (held < mass - 1e-6).sum(-1) + 1
    return needed.clamp_max(weights.shape[-1]) / weights.shape[-1]
