"""Timing of competitors in turn: what disturbs the machine for a moment meets all of them."""

import time
from collections.abc import Callable, Mapping

Run = Callable[[], object]


def best_seconds(runs: Mapping[str, Run], seconds: float, least: int = 5) -> dict[str, float]:
    """The shortest time of each run, taking turns for about `seconds`, at least `least` times.

    The shortest, not the mean: a run cannot be faster than the machine, only slower.
    """
    best = dict.fromkeys(runs, float("inf"))
    start, turns = time.perf_counter(), -1  # the first turn warms up and does not count
    while turns < least or time.perf_counter() - start < seconds:
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            if turns >= 0:
                best[name] = min(best[name], time.perf_counter() - begin)
        turns += 1
    return best
