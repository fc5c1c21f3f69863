"""`tova`: token omission via attention (Oren et al., "Transformers are Multi-State RNNs")."""

from torch import Tensor

from sparse_attn.policies.scored import ScoredPolicy


class Tova(ScoredPolicy):
    """Drops the key to which the newest query gave the least weight, on average over the heads of
    the layer, so that all heads keep the same keys. See `ScoredPolicy`."""

    name = "tova"

    def accumulate(self, columns: Tensor, weights: Tensor) -> Tensor:
        return weights.mean(1, keepdim=True).expand_as(weights)[..., None]

    def score(self, columns: Tensor) -> Tensor:
        return columns[..., 0]
