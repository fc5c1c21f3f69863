"""Benchmarks with their prompts, and scorers that the user brings: "package.module:name".

geneval: the name is a function of no arguments that returns a `geneval.Detector`.
dpg: the name is a function of no arguments that returns a `dpg.Answerer`.
judge: the name is a function of no arguments that returns an `evaluate.Judge`.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from engine.judges import dpg, geneval

Judge = Callable[[Mapping[str, Any], np.ndarray[Any, Any]], Mapping[str, float]]
"""Scores a picture, uint8 [height, width, 3], against what is known of its prompt: named, 0..1."""
SUITES = ("geneval", "dpg", "judge")


def load(name: str) -> Any:
    """What the function that `name` ("package.module:function") names returns.

    Raises ValueError if there is no such thing.
    """
    module, colon, function = name.partition(":")
    try:
        found = getattr(import_module(module), function) if colon else None
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"cannot load {name!r}: {error}") from error
    if not callable(found):
        raise ValueError(f"{name!r} must name a function, as package.module:function")
    return found()


def judge_of(suite: str, scorer: str) -> Judge:
    """Raises ValueError for an unknown suite or scorer."""
    if suite not in SUITES:
        raise ValueError(f"unknown suite {suite!r}; known: {', '.join(SUITES)}")
    loaded = load(scorer)
    if suite == "geneval":
        return lambda facts, pixels: {"geneval": float(geneval.right(facts, loaded(pixels, facts)))}
    if suite == "dpg":
        return lambda facts, pixels: {"dpg": _dpg(facts["questions"], pixels, loaded)}
    judge: Judge = loaded
    return judge


def _dpg(questions: Sequence[dpg.Question], pixels: Any, answer: dpg.Answerer) -> float:
    answers = {q.number: answer(pixels, q.text) for q in questions}
    return dpg.picture_score(questions, answers)


def dpg_prompts(path: Path) -> tuple[tuple[str, ...], tuple[Mapping[str, Any], ...]]:
    """Prompts and facts of a DPG-Bench CSV. Raises ValueError."""
    items = dpg.read(path).values()
    return tuple(p for p, _ in items), tuple({"questions": qs} for _, qs in items)
