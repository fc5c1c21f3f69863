"""Confidence intervals by resampling prompts: pictures of one prompt are not independent."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

ROUNDS = 2000
LEVEL = 0.95
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and the percentile interval of its bootstrap."""

    value: float
    low: float
    high: float


def interval(
    values: Sequence[float] | Floats, clusters: Sequence[int], rounds: int = ROUNDS, seed: int = 0
) -> Interval:
    """Of the mean. clusters: the prompt of each value; whole prompts are drawn with replacement."""
    given = np.asarray(values, dtype=np.float64)
    return statistic(lambda at: float(given[at].mean()), clusters, rounds, seed)


def statistic(
    of: Callable[[npt.NDArray[np.int64]], float],
    clusters: Sequence[int],
    rounds: int = ROUNDS,
    seed: int = 0,
) -> Interval:
    """Of anything that can be computed from the pictures at the given numbers, repeats included."""
    labels = np.asarray(clusters)
    members = [np.flatnonzero(labels == c) for c in np.unique(labels)]
    generator = np.random.default_rng(seed)
    found = [
        of(
            np.concatenate(
                [members[i] for i in generator.integers(len(members), size=len(members))]
            )
        )
        for _ in range(rounds)
    ]
    low, high = np.quantile(found, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(of(np.arange(len(labels))), float(low), float(high))
