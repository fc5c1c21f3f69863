"""DPG-Bench's way of scoring (Hu et al., 2024; its graph of questions is that of DSG), with the
user's question-answering model.

Questions of a prompt hang on others ("is the dog brown?" on "is there a dog?"): what hangs on a no
counts as no. A picture's score is the share of questions answered yes, a prompt's the mean of its
pictures, the whole the mean of the prompts, times 100.
"""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt8


@dataclass(frozen=True, slots=True)
class Question:
    """`needs`: numbers of the questions that must be answered yes for this one to count."""

    number: int
    text: str
    category: str
    needs: tuple[int, ...]


Answerer = Callable[[UInt8[np.ndarray, "height width 3"], str], bool]
"""Whether a picture answers a question with yes."""


def read(path: Path) -> dict[str, tuple[str, list[Question]]]:
    """Item -> (prompt, questions) of the benchmark's CSV. Raises ValueError naming the line."""
    items: dict[str, tuple[str, list[Question]]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for line, row in enumerate(csv.DictReader(file), 2):
            try:
                question = _question(row)
                items.setdefault(row["item_id"], (row["text"], []))[1].append(question)
            except (KeyError, ValueError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {line}: not a question of DPG-Bench: {error}"
                ) from None
    return items


def _question(row: Mapping[str, str]) -> Question:
    """A dependency of 0 is none."""
    needs = tuple(int(n) for n in row["dependency"].split(",") if n.strip() not in ("", "0"))
    return Question(
        int(row["proposition_id"]), row["question_natural_language"], row["category_broad"], needs
    )


def counted(questions: Sequence[Question], answers: Mapping[int, bool]) -> dict[int, bool]:
    """Answers by question number, with no for what hangs on a no, however far up."""
    by_number = {q.number: q for q in questions}

    def yes(number: int, seen: frozenset[int]) -> bool:
        if number in seen or number not in by_number:
            return number not in by_number
        needs = by_number[number].needs
        return answers[number] and all(yes(n, seen | {number}) for n in needs)

    return {q.number: yes(q.number, frozenset()) for q in questions}


def picture_score(questions: Sequence[Question], answers: Mapping[int, bool]) -> float:
    """Share of the questions that count as yes."""
    found = counted(questions, answers)
    return sum(found.values()) / len(found)


def overall(prompts: Iterable[Sequence[float]]) -> float:
    """0..100, of the scores of each prompt's pictures."""
    means = [sum(scores) / len(scores) for scores in prompts]
    return 100 * sum(means) / len(means)
