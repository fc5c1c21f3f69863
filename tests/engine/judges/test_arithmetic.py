"""Intervals, distances and the arithmetic of published benchmarks."""

import math
from pathlib import Path

import numpy as np
import pytest

from engine.judges import dpg, geneval
from engine.judges.bootstrap import interval, statistic
from engine.judges.frechet import frechet
from engine.judges.geneval import Found
from engine.judges.suites import judge_of

PIXELS = np.zeros((8, 8, 3), np.uint8)


@pytest.mark.parametrize("seed", range(3))
def test_intervals_cover_as_often_as_they_say(seed: int) -> None:
    generator = np.random.default_rng(seed)
    covered = 0
    for _ in range(100):
        found = interval(generator.normal(1.0, 1.0, 40), range(40), rounds=200, seed=seed)
        covered += found.low <= 1.0 <= found.high
    assert 86 <= covered <= 100


def test_pictures_of_one_prompt_count_as_one() -> None:
    """Ten equal pictures of each prompt tell no more than one."""
    values = np.random.default_rng(0).normal(size=12)
    once = interval(values, range(12))
    ten = interval(np.repeat(values, 10), np.repeat(range(12), 10))
    assert (ten.low, ten.high) == pytest.approx((once.low, once.high))
    assert statistic(lambda at: float(len(at)), [0, 0, 1]).value == 3


def test_frechet_against_its_formula() -> None:
    generator = np.random.default_rng(1)
    one, other = generator.normal(size=(40, 5)), 0.5 + 2 * generator.normal(size=(50, 5))
    a, b = np.cov(one.T), np.cov(other.T)
    values, vectors = np.linalg.eigh(a)
    root = vectors * np.sqrt(values) @ vectors.T
    cross = np.sqrt(np.linalg.eigvalsh(root @ b @ root)).sum()
    wanted = np.square(one.mean(0) - other.mean(0)).sum() + np.trace(a + b) - 2 * cross
    assert frechet(one, other) == pytest.approx(wanted)
    assert frechet(one, one) == pytest.approx(0, abs=1e-9)
    assert frechet(one[:3], other[:3]) > 0, "fewer pictures than dimensions"


@pytest.mark.parametrize(
    ("tasks", "published"),
    [
        ((0.97, 0.38, 0.35, 0.76, 0.04, 0.06), 0.43),  # Stable Diffusion 1.5
        ((0.98, 0.74, 0.39, 0.85, 0.15, 0.23), 0.55),  # SDXL
        ((0.99, 0.89, 0.59, 0.90, 0.79, 0.66), 0.80),  # Janus-Pro-7B
    ],
)
def test_overall_geneval_scores_as_published(tasks: tuple[float, ...], published: float) -> None:
    scored = [
        (f"task {i}", float(k < round(100 * share)))
        for i, share in enumerate(tasks)
        for k in range(100)
    ]
    found = geneval.summary([*scored, *scored[:300]])  # tasks of other sizes weigh the same
    assert found["overall"] == pytest.approx(published, abs=0.01)  # tasks are rounded too
    assert found["task 1"] == pytest.approx(tasks[1])


def box(x: float, y: float, name: str = "cat", color: str | None = None, side: float = 10) -> Found:
    return Found(name, (x, y, x + side, y + side), color)


@pytest.mark.parametrize(
    ("include", "found", "right"),
    [
        ([{"class": "cat", "count": 2}], [box(0, 0), box(50, 0)], True),
        ([{"class": "cat", "count": 2}], [box(0, 0)], False),
        ([{"class": "cat", "count": 1, "color": "red"}], [box(0, 0, color="red")], True),
        ([{"class": "cat", "count": 1, "color": "red"}], [box(0, 0, color="blue")], False),
        ([{"class": "dog", "count": 1},
          {"class": "cat", "count": 1, "position": ["left of", 0]}],
         [box(0, 0), box(50, 0, "dog")], True),
        ([{"class": "dog", "count": 1},
          {"class": "cat", "count": 1, "position": ["above", 0]}],
         [box(0, 0), box(50, 0, "dog")], False),
    ],
)  # fmt: skip
def test_geneval_pictures(
    include: list[dict[str, object]], found: list[Found], right: bool
) -> None:
    assert geneval.right({"include": include}, found) is right


def test_geneval_excludes_one_too_many() -> None:
    facts = {
        "include": [{"class": "cat", "count": 2}], "exclude": [{"class": "cat", "count": 3}],
    }  # fmt: skip
    two = [box(0, 0), box(50, 0)]
    assert geneval.right(facts, two) and not geneval.right(facts, [*two, box(90, 0)])


@pytest.mark.parametrize("angle", range(0, 360, 15))
def test_relations_are_mirror_images(angle: int) -> None:
    x, y = 100 * math.cos(math.radians(angle)), 100 * math.sin(math.radians(angle))
    opposite = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    found = geneval.relations(box(0, 0), box(x, y))
    assert found and {opposite[r] for r in found} == geneval.relations(box(x, y), box(0, 0))
    assert geneval.relations(box(0, 0), box(1, 1)) == set()


def test_dpg_answers_that_hang_on_a_no() -> None:
    questions = [
        dpg.Question(1, "is there a dog?", "entity", ()),
        dpg.Question(2, "is it brown?", "attribute", (1,)),
        dpg.Question(3, "is the brown dog old?", "attribute", (1, 2)),
        dpg.Question(4, "is there a hat?", "entity", ()),
    ]
    assert dpg.picture_score(questions, {1: True, 2: True, 3: True, 4: False}) == 0.75
    assert dpg.picture_score(questions, {1: False, 2: True, 3: True, 4: True}) == 0.25
    assert dpg.picture_score(questions, {1: True, 2: False, 3: True, 4: True}) == 0.5
    assert dpg.overall([[1.0, 0.5], [0.25]]) == pytest.approx(50)


def test_dpg_file(tmp_path: Path) -> None:
    path = tmp_path / "dpg.csv"
    head = (
        "item_id,text,keywords,proposition_id,dependency,category_broad,question_natural_language"
    )
    path.write_text(
        f'{head}\na,"a dog, brown",,1,0,entity,is there a dog?\n'
        'a,"a dog, brown",,2,1,attribute,is it brown?\nb,a hat,,1,0,entity,is there a hat?\n'
    )
    items = dpg.read(path)
    assert items["a"][0] == "a dog, brown" and items["a"][1][1].needs == (1,)
    path.write_text(f"{head}\na,x,,one,0,entity,is it?\n")
    with pytest.raises(ValueError, match="line 2"):
        dpg.read(path)


def fake_detector() -> geneval.Detector:
    return lambda pixels, facts: [box(0, 0, facts["include"][0]["class"])]


def fake_answerer() -> dpg.Answerer:
    return lambda pixels, question: "dog" in question


def test_suites_with_fake_scorers() -> None:
    judge = judge_of("geneval", f"{__name__}:fake_detector")
    assert judge({"tag": "x", "include": [{"class": "hat", "count": 1}]}, PIXELS) == {"geneval": 1}
    judge = judge_of("dpg", f"{__name__}:fake_answerer")
    questions = [dpg.Question(1, "a dog?", "entity", ()), dpg.Question(2, "a hat?", "entity", ())]
    assert judge({"questions": questions}, PIXELS) == {"dpg": 0.5}
    for name in ("nowhere:x", "math", "math:pi", "math:nothing"):
        with pytest.raises(ValueError, match="cannot load|must name"):
            judge_of("geneval", name)
    with pytest.raises(ValueError, match="unknown suite"):
        judge_of("clip", "math:sin")
