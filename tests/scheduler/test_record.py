"""What was recorded is read back exactly, and nothing else is accepted."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.plan import PREFILL, ImageStep, StepPlan, StepResult, SubBatch
from scheduler.record import RecordError, from_line, read, to_line

PLAN = StepPlan(
    0,
    (
        SubBatch("a", "decode", (ImageStep(1, 7, (0, 256)), ImageStep(2, 0, (512,)))),
        SubBatch("b", "prefill", (ImageStep(4, PREFILL, (1024, 2048)),)),
    ),
    (3,),
)
RESULT = StepResult(0, {2: "NaN logits"})
WORDS = st.text(max_size=5)
STEP = st.integers(0, 2**40)
DECODE = st.builds(ImageStep, STEP, STEP, st.lists(STEP, min_size=1, max_size=2).map(tuple))


@settings(deadline=None)
@given(
    st.builds(
        StepPlan,
        STEP,
        st.lists(DECODE, min_size=1, unique_by=lambda step: step.image).map(
            lambda steps: (SubBatch("g", "decode", tuple(steps)),)
        ),
        st.lists(STEP).map(tuple),
    )
    | st.builds(StepResult, STEP, st.dictionaries(STEP, WORDS))
)
def test_round_trip(item: StepPlan | StepResult) -> None:
    line = to_line(item)
    assert "\n" not in line
    assert from_line(line) == item


def test_round_trip_of_a_mixed_plan_and_of_a_result() -> None:
    assert from_line(to_line(PLAN)) == PLAN
    assert from_line(to_line(RESULT)) == RESULT


def test_reads_a_run_that_was_cut_short_after_a_plan() -> None:
    run: list[StepPlan | StepResult] = [PLAN, RESULT, replace(PLAN, step=1)]
    assert list(read(map(to_line, run))) == run
    assert list(read([])) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"step":0', '"step":"0"', "plan.step: Input should be a valid integer"),
        ('"step":0', '"step":true', "plan.step: Input should be a valid integer"),
        ('"step":0', '"step":0.0', "plan.step: Input should be a valid integer"),
        ('"step":0', '"step":-1', "step -1 is negative"),
        ('"step":0', '"step":0,"x":1', "plan.x: Unexpected"),
        ('"step":0,', "", "plan.step: Field required"),
        ('"slots":[512]', '"slots":512', "slots: Input should be a valid array"),
        ('"slots":[512]', '"slots":[-512]', "not a decode step"),
        ('"slots":[512]', '"slots":[]', "not a decode step"),
        ('"position":7', '"position":-1', "not a decode step"),
        ('"position":-1', '"position":0', "not a prefill step"),
        ('"position":7', '"position":-2', "not a decode step"),
        ('"phase":"decode"', '"phase":"rest"', "phase: Input should be 'prefill' or 'decode'"),
        ('"image":4', '"image":1', "an image occurs twice in step 0"),
        ('"images":[{"image":4,"position":-1,"slots":[1024,2048]}]', '"images":[]', "an empty"),
        ('"plan":', '"Plan":', "Plan: Extra inputs"),
        ("]}}", "]}", "Invalid JSON"),
        ("]}}", ']},"result":{"step":0}}', "either a plan or a result"),
        ("]}}", ']},"result":null}', "either a plan or a result"),
    ],
)
def test_refuses_a_damaged_plan(old: str, new: str, message: str) -> None:
    line = to_line(PLAN)
    assert old in line
    with pytest.raises(RecordError) as error:
        from_line(line.replace(old, new, 1))
    assert message in str(error.value)


@pytest.mark.parametrize("line", ["", "{}", "[]", "null", '{"plan":null}', '{"result":{}}'])
def test_refuses_what_is_neither(line: str) -> None:
    with pytest.raises(RecordError):
        from_line(line)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ([RESULT], "line 1: expected StepPlan of step 0, found StepResult of step 0"),
        ([PLAN, PLAN], "line 2: expected StepResult of step 0, found StepPlan of step 0"),
        ([PLAN, replace(RESULT, step=1)], "line 2: expected StepResult of step 0"),
        ([PLAN, RESULT, PLAN], "line 3: expected StepPlan of step 1, found StepPlan of step 0"),
        ([PLAN, StepResult(0, {3: "x"})], "line 2: failed images [3] were not in step 0"),
    ],
)
def test_refuses_steps_out_of_turn(run: list[StepPlan | StepResult], message: str) -> None:
    with pytest.raises(RecordError) as error:
        list(read(map(to_line, run)))
    assert message in str(error.value)


def test_names_the_damaged_line() -> None:
    with pytest.raises(RecordError, match=r"^line 2: the line: Invalid JSON"):
        list(read([to_line(PLAN), "{"]))
