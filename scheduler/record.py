"""A run as JSON lines: every StepPlan and StepResult, to replay it or to look at it.

One object a line, `{"plan": {...}}` or `{"result": {...}}` with the fields of the dataclasses.
Reading is strict: an unknown or missing field, a wrong type, a step out of turn or an image that
occurs twice in a plan is a `RecordError` that names the line.
"""

from collections.abc import Iterable, Iterator

from pydantic import BaseModel, ConfigDict, ValidationError

from scheduler.plan import PREFILL, StepPlan, StepResult, SubBatch


class RecordError(ValueError):
    """A line that is not what `to_line` writes, or that does not follow from the one before."""


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    plan: StepPlan | None = None
    result: StepResult | None = None


def to_line(item: StepPlan | StepResult) -> str:
    """One line of JSON, without the line break."""
    line = _Line(plan=item) if isinstance(item, StepPlan) else _Line(result=item)
    return line.model_dump_json(exclude_none=True)


def from_line(line: str) -> StepPlan | StepResult:
    """The inverse of `to_line`. Raises RecordError."""
    try:
        parsed = _Line.model_validate_json(line)
    except ValidationError as error:
        raise RecordError(_explain(error)) from error
    item = parsed.plan or parsed.result
    if item is None or len(parsed.model_fields_set) != 1:
        raise RecordError("a line holds either a plan or a result")
    if item.step < 0:
        raise RecordError(f"step {item.step} is negative")
    if isinstance(item, StepPlan):
        _check(item)
    return item


def read(lines: Iterable[str]) -> Iterator[StepPlan | StepResult]:
    """Plans and results in turn, steps counted from 0. A run cut short may end with a plan.

    Raises RecordError with the number of the line (from 1)."""
    plan: StepPlan | None = None
    for number, line in enumerate(lines):
        try:
            item = from_line(line)
            _check_turn(item, number, plan)
        except RecordError as error:
            raise RecordError(f"line {number + 1}: {error}") from error
        plan = item if isinstance(item, StepPlan) else None
        yield item


def _explain(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"])) or "the line"
    return f"{where}: {first['msg']}"


def _images(plan: StepPlan) -> list[int]:
    return [step.image for batch in plan.sub_batches for step in batch.images]


def _check_turn(item: StepPlan | StepResult, number: int, plan: StepPlan | None) -> None:
    step, kind = number // 2, StepResult if number % 2 else StepPlan
    if type(item) is not kind or item.step != step:
        found = f"{type(item).__name__} of step {item.step}"
        raise RecordError(f"expected {kind.__name__} of step {step}, found {found}")
    failed = item.failed.keys() if isinstance(item, StepResult) else set[int]()
    if plan is not None and (strangers := sorted(failed - set(_images(plan)))):
        raise RecordError(f"failed images {strangers} were not in step {step}")


def _check(plan: StepPlan) -> None:
    """What types cannot say about a plan."""
    images = _images(plan)
    if len(set(images)) < len(images):
        raise RecordError(f"an image occurs twice in step {plan.step}")
    for batch in plan.sub_batches:
        _check_sub_batch(batch)


def _check_sub_batch(batch: SubBatch) -> None:
    if not batch.images:
        raise RecordError(f"an empty {batch.phase} sub-batch")
    for step in batch.images:
        phase = "prefill" if step.position == PREFILL else "decode"
        if phase != batch.phase or step.position < PREFILL or min(step.slots, default=-1) < 0:
            raise RecordError(f"not a {batch.phase} step: {step}")
