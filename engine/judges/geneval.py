"""GenEval's way of scoring (Ghosh et al., 2023), with the user's detector.

A line of its prompt file: {"tag", "prompt", "include": [{"class", "count", "color"?,
"position"?: [relation, index]}], "exclude"?: [{"class", "count"}]}. A picture is right if every
object of `include` is there (for the tag "counting", exactly as often; `exclude` says so), in its
colour and place. A task's score is its share of right pictures; the overall score is the mean of
the tasks.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import hypot
from typing import Any

import numpy as np
from jaxtyping import UInt8

MARGIN = 0.1
"""Of the summed sides: boxes whose centres are closer stand nowhere in particular."""


@dataclass(frozen=True, slots=True)
class Found:
    """One object that the detector saw. box: x0, y0, x1, y1 in pixels, y downwards."""

    name: str
    box: tuple[float, float, float, float]
    color: str | None = None


Detector = Callable[[UInt8[np.ndarray, "height width 3"], Mapping[str, Any]], Sequence[Found]]
"""The objects of a picture, surest first. It is shown the prompt's line: which classes are looked
for, and that counting wants surer ones."""


def right(facts: Mapping[str, Any], found: Sequence[Found]) -> bool:
    """Whether a picture shows what its line asks for."""
    chosen: list[list[Found]] = []
    for wanted in facts.get("include", []):
        own = [f for f in found if f.name == wanted["class"]][: wanted["count"]]
        if len(own) < wanted["count"] or not _colored(own, wanted.get("color")):
            return False
        if "position" in wanted and wanted["position"] is not None:
            relation, target = wanted["position"]
            if not all(relation in relations(a, b) for a in own for b in chosen[target]):
                return False
        chosen.append(own)
    return all(
        sum(f.name == barred["class"] for f in found) < barred["count"]
        for barred in facts.get("exclude", [])
    )


def _colored(objects: Sequence[Found], color: str | None) -> bool:
    return color is None or all(o.color == color for o in objects)


def relations(one: Found, other: Found) -> set[str]:
    """How `one` stands to `other`; empty where they nearly coincide, two where it is oblique."""
    (ax, ay, aw, ah), (bx, by, bw, bh) = _center(one), _center(other)
    away = hypot(ax - bx, ay - by)
    dx, dy = _beyond(ax - bx, MARGIN * (aw + bw)), _beyond(ay - by, MARGIN * (ah + bh))
    if away == 0 or max(abs(dx), abs(dy)) < 1e-3:
        return set()
    named = {"left of": -dx, "right of": dx, "above": -dy, "below": dy}
    return {name for name, distance in named.items() if distance / away > 0.5}


def _center(found: Found) -> tuple[float, float, float, float]:
    x0, y0, x1, y1 = found.box
    return (x0 + x1) / 2, (y0 + y1) / 2, x1 - x0, y1 - y0


def _beyond(distance: float, margin: float) -> float:
    far = max(abs(distance) - margin, 0.0)
    return far if distance > 0 else -far


def summary(scored: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Scores by task of (tag, score of a picture), and "overall": the mean of the tasks."""
    by_tag: dict[str, list[float]] = defaultdict(list)
    for tag, score in scored:
        by_tag[tag].append(score)
    tasks = {tag: sum(scores) / len(scores) for tag, scores in by_tag.items()}
    return tasks | {"overall": sum(tasks.values()) / len(tasks)}
