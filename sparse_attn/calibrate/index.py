"""The directions of an index: PCA per head of keys before rotary embedding."""

import torch
from jaxtyping import Float
from torch import Tensor

from sparse_attn.index import GAUSSIAN_STEP


def principal_directions(
    covariance: Float[Tensor, "H D D"], dims: int
) -> tuple[Float[Tensor, "H D r"], Float[Tensor, "H r"]]:
    """Directions of largest variance and the quantisation step along each.

    The sign of a direction is arbitrary; its largest component is made positive, so that the same
    statistics give the same file.
    """
    variance, vectors = torch.linalg.eigh(covariance.double())
    vectors, variance = vectors.flip(-1)[..., :dims], variance.flip(-1)[..., :dims]
    largest = vectors.gather(1, vectors.abs().argmax(1, keepdim=True))
    deviation = variance.clamp_min(1e-12).sqrt()
    return (vectors * largest.sign()).float(), (deviation * GAUSSIAN_STEP).float()
