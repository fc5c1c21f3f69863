"""Policies against dense attention on finished pictures, teacher-forced: likelihood and KL."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from engine.models.base import VisualModel
from engine.shares import shares
from engine.teacher import Pictures, PolicyAttention, forced_tokens, log_probabilities
from sparse_attn.format import FORMATS
from sparse_attn.policies.dense import Dense
from sparse_attn.policy import Heads, ReadPolicy

BATCH = 4


@dataclass(frozen=True, slots=True, eq=False)
class Compared:
    """One policy and format. loss: [B], nats per visual token above dense. kl: [B], of the policy's
    predictions from the dense ones, nats per visual token. reads: keys per query and head."""

    loss: Float[Tensor, "B"]
    kl: Float[Tensor, "B"]
    reads: float


class Comparison:
    """Dense predictions of one set of pictures, held in memory (9.4 MB a picture of `mini`)."""

    def __init__(self, model: VisualModel, pictures: Pictures) -> None:
        self.model, self.pictures = model, pictures
        heads = Heads(model.shape.layers, model.shape.kv_heads)
        self._free = ~forced_tokens(model, model.grid)
        self._dense, _ = self._predict(Dense(model.grid, heads), "bf16")
        self.dense_nll = torch.stack([self._nll(i, p) for i, p in enumerate(self._dense)])

    def of(self, policy: ReadPolicy, format: str = "bf16") -> Compared:
        """Plain formats count as exact; what they lose is far below what policies lose."""
        predicted, reads = self._predict(policy, format)
        nll = torch.stack([self._nll(i, p) for i, p in enumerate(predicted)])
        kl = [
            (dense.exp() * (dense - p)).sum(-1)[self._free].mean()
            for dense, p in zip(self._dense, predicted, strict=True)
        ]
        return Compared(nll - self.dense_nll, torch.stack(kl), reads)

    def row(self, policy: ReadPolicy, format: str = "bf16") -> dict[str, Any]:
        """Means with standard errors over pictures, and bytes against dense bf16."""
        found = self.of(policy, format)
        return {
            "loss": float(found.loss.mean()),
            "loss_se": error(found.loss),
            "kl": float(found.kl.mean()),
            "kl_se": error(found.kl),
            "keys_read": found.reads,
            **shares(policy, format, self.model.shape.head_dim),
            "pictures": len(self.pictures),
            "dense_nll": float(self.dense_nll.mean()),
        }

    def _predict(self, policy: ReadPolicy, format: str) -> tuple[list[Tensor], float]:
        attend = PolicyAttention(policy, None if format == "bf16" else FORMATS[format])
        found: list[Tensor] = []
        for part in self.pictures.split(BATCH):
            found += log_probabilities(self.model, policy.grid, part, attend)
        return found, attend.reads

    def _nll(self, number: int, predicted: Tensor) -> Tensor:
        tokens = self.pictures.tokens[number]
        last = predicted.shape[1] - 1
        loss = -predicted.gather(1, tokens.clamp_max(last)[:, None])[:, 0]
        return loss[self._free].mean()


def error(values: Tensor) -> float:
    """Standard error of the mean; 0 for one value."""
    return float(values.std() / len(values) ** 0.5) if len(values) > 1 else 0.0
