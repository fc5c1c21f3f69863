"""Attention among the tokens of a prompt, for comparison with decode."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cosine_similarity

from sparse_attn.characterize.rows import MASSES, density_for, entropy


@dataclass(eq=False)
class PromptCharacter:
    """Means over the query tokens of prompts, all but the first (which sees itself alone)."""

    heads: int
    queries: int = 0

    def __post_init__(self) -> None:
        self.sums: dict[str, float] = {}

    def add(self, q: Float[Tensor, "P H D"], k: Float[Tensor, "P H D"]) -> None:
        """One prompt, after rotary embedding."""
        count = len(q)
        if count < 3:
            return
        score = torch.einsum("thd,jhd->htj", q, k) * q.shape[-1] ** -0.5
        hidden = torch.ones(count, count, device=q.device).triu(1).bool()
        weights = score.masked_fill(hidden, -torch.inf).softmax(-1)
        for name, value in self._values(weights).items():
            self.sums[name] = self.sums.get(name, 0.0) + value * (count - 1)
        self.queries += count - 1

    def _values(self, weights: Float[Tensor, "H P P"]) -> dict[str, float]:
        rows = [weights[:, t, : t + 1] for t in range(1, weights.shape[1])]
        found = {
            "first_token": weights[:, 1:, 0].mean(),
            "own_token": weights.diagonal(dim1=1, dim2=2)[:, 1:].mean(),
            "entropy": entropy(weights[:, 1:]).mean(),
            "vertical": cosine_similarity(weights[:, 1:], weights[:, :-1], -1).mean(),
            "diagonal": cosine_similarity(weights[:, 1:, 1:], weights[:, :-1, :-1], -1).mean(),
        }
        for m in MASSES:
            found[f"density_{m:g}"] = torch.stack([density_for(r, m) for r in rows]).mean()
        return {name: float(value) for name, value in found.items()}

    def means(self) -> dict[str, float]:
        """Mass on the first and on the query's own token, entropy (nats), density for shares of the
        mass, and similarity of neighbouring rows (d = 1)."""
        return {name: value / self.queries for name, value in self.sums.items()}
