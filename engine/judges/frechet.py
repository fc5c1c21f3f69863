"""Frechet distance of two sets of features (Dowson and Landau, 1982), as FID has it."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def frechet(one: Floats, other: Floats) -> float:
    """Of features [n, d] and [m, d] taken as normal: |mean difference|^2 + tr(A + B - 2 (AB)^.5).

    The trace of the root is the nuclear norm of the product of the centred sets, so no d x d matrix
    is needed where there are fewer pictures than dimensions. Biased upwards for few pictures.
    """
    a, b = _centred(one), _centred(other)
    shift = float(np.square(one.mean(0) - other.mean(0)).sum())
    cross = float(np.linalg.svd(a @ b.T, compute_uv=False).sum())
    return shift + float(np.square(a).sum() + np.square(b).sum()) - 2 * cross


def _centred(features: Floats) -> Floats:
    """Rows whose Gram matrix is the covariance."""
    centred: Floats = (features - features.mean(0)) / np.sqrt(max(1, len(features) - 1))
    return centred
