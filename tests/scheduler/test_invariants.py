"""Random runs against an independent model of what an engine sees.

The model knows only the tasks, the plans and the results; it recomputes memory from the slots in
the plans and never looks inside the scheduler.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from scheduler.config import CACHE_ALIGNMENT as UNIT
from scheduler.config import SchedulerConfig
from scheduler.plan import PREFILL, ImageStep, ImageTask, StepPlan, StepResult
from scheduler.record import read, to_line
from scheduler.request import Priority, RequestError
from scheduler.scheduler import ImageEnd, Scheduler

CACHE_UNITS = 24
SIZES = st.lists(st.integers(1, 12 * UNIT), min_size=1, max_size=2).map(tuple)
IMAGES = st.lists(st.tuples(SIZES, st.integers(1, 4)), min_size=1, max_size=4)
REQUESTS = st.integers(0, 12).map("r{}".format)
CONFIGS = st.builds(
    SchedulerConfig,
    cache_bytes=st.just(CACHE_UNITS * UNIT),
    max_images=st.integers(1, 8),
    max_prefill_images=st.integers(1, 4),
    sub_batch_images=st.integers(1, 4),
)


def rounded(size: int) -> int:
    return -(-size // UNIT) * UNIT


def steps_of(plan: StepPlan) -> dict[int, ImageStep]:
    steps = [step for sub in plan.sub_batches for step in sub.images]
    assert len({step.image for step in steps}) == len(steps), "an image runs twice in a step"
    return {step.image: step for step in steps}


@dataclass
class House:
    """What the engine holds: images it has state for, with their last step."""

    held: dict[int, ImageStep] = field(default_factory=dict)
    next_position: dict[int, int] = field(default_factory=dict)


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, ImageTask] = {}
        self.ended: set[int] = set()
        self.house = House()
        self.plan: StepPlan | None = None
        self.calls: list[Callable[[Scheduler], object]] = []
        self.answers: list[object] = []
        self.record: list[StepPlan | StepResult] = []
        self.images = 0
        self.steps = 0

    @initialize(config=CONFIGS)
    def start(self, config: SchedulerConfig) -> None:
        self.config = config
        self.scheduler = Scheduler(config)

    def call(self, function: Callable[[Scheduler], object]) -> object:
        self.calls.append(function)
        self.answers.append(function(self.scheduler))
        return self.answers[-1]

    # -- what happens to a scheduler ---------------------------------------------------------

    @rule(
        images=IMAGES,
        request=REQUESTS,
        group=st.sampled_from("ab"),
        level=st.sampled_from(Priority),
    )
    def add(
        self, images: list[tuple[tuple[int, ...], int]], request: str, group: str, level: Priority
    ) -> None:
        tasks = [
            ImageTask(self.images + i, request, group, tokens, sizes, level)
            for i, (sizes, tokens) in enumerate(images)
        ]
        self.images += len(tasks)
        self.call(lambda scheduler: scheduler.add(tasks))
        self.live |= {task.image: task for task in tasks}

    @rule(units=st.integers(CACHE_UNITS + 1, 100), level=st.sampled_from(Priority))
    def add_one_that_never_fits(self, units: int, level: Priority) -> None:
        good = ImageTask(self.images, "x", "a", 1, (1,), level)
        bad = ImageTask(self.images + 1, "x", "a", 1, (UNIT, (units - 1) * UNIT), level)
        before = self.scheduler.stats()
        try:
            self.scheduler.add([good, bad])
        except RequestError:
            assert self.scheduler.stats() == before
        else:
            raise AssertionError("an image that can never fit was accepted")

    @rule(request=REQUESTS)
    def abort_request(self, request: str) -> None:
        mine = [image for image, task in self.live.items() if task.request == request]
        assert self.call(lambda scheduler: scheduler.abort(request)) == mine
        for image in mine:
            self.end(image)

    @rule(data=st.data())
    def abort_image(self, data: st.DataObject) -> None:
        image = data.draw(st.integers(0, self.images))
        alive = image in self.live
        assert self.call(lambda scheduler: scheduler.abort_image(image)) == alive
        if alive:
            self.end(image)

    @precondition(lambda self: self.plan is None)
    @rule()
    def schedule(self) -> None:
        plan = self.call(lambda scheduler: scheduler.schedule())
        if plan is None:
            assert not self.live
            assert not self.house.held
            return
        assert isinstance(plan, StepPlan)
        assert plan.step == self.steps
        self.steps += 1
        self.plan = plan
        self.record.append(plan)
        self.check_plan(plan)

    @precondition(lambda self: self.plan is not None)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        assert self.plan is not None
        images = list(steps_of(self.plan))
        failed = data.draw(st.sets(st.sampled_from(images), max_size=2)) if images else set()
        self.commit_step(dict.fromkeys(failed, "broken"))

    # -- what must hold ----------------------------------------------------------------------

    def commit_step(self, failed: dict[int, str]) -> None:
        assert self.plan is not None
        result = StepResult(self.plan.step, failed)
        expected = list[ImageEnd]()
        for image, step in steps_of(self.plan).items():
            task = self.live.get(image)
            self.house.next_position[image] = step.position + 1
            if task and (image in failed or step.position + 2 == task.tokens):
                expected.append(ImageEnd(image, task.request, failed.get(image)))
        assert self.call(lambda scheduler: scheduler.commit(result)) == expected
        for end in expected:
            self.end(end.image)
        self.record.append(result)
        self.plan = None
        held = [task for image, task in self.live.items() if image in self.house.held]
        used = sum(rounded(size) for task in held for size in task.sequence_bytes)
        assert self.scheduler.stats().used_bytes == used, "memory of ended images is free at once"

    def end(self, image: int) -> None:
        assert image not in self.ended, "an image ended twice"
        self.ended.add(image)
        del self.live[image]

    def check_plan(self, plan: StepPlan) -> None:
        steps = steps_of(plan)
        before = dict(self.house.held)
        self.forget_released(plan)
        started = [image for image in steps if image not in self.house.held]
        self.check_positions(steps, started)
        self.house.held = steps
        self.check_limits(plan, started)
        self.check_order(steps, started)
        self.check_parked([i for i in plan.released if i in self.live], before, steps, started)
        holes = self.holes(steps)
        self.check_no_head_waits_in_vain(steps, started)
        stats = self.scheduler.stats()
        assert (stats.running, stats.running + stats.waiting + stats.parked) == (
            len(steps),
            len(self.live),
        )
        assert stats.total_bytes - stats.used_bytes == sum(holes)
        assert stats.largest_free_bytes == max(holes, default=0)

    def forget_released(self, plan: StepPlan) -> None:
        assert len(set(plan.released)) == len(plan.released)
        for image in plan.released:
            assert self.house.held.pop(image, None), "released without ever having run"

    def check_positions(self, steps: dict[int, ImageStep], started: list[int]) -> None:
        assert set(self.house.held) <= set(steps), "an image neither runs nor was released"
        for image, step in steps.items():
            assert image in self.live
            if image in started:
                assert step.position == PREFILL
            else:
                assert step.position == self.house.next_position[image]
                assert step.slots == self.house.held[image].slots

    def check_limits(self, plan: StepPlan, started: list[int]) -> None:
        assert len(started) <= self.config.max_prefill_images
        assert len(self.house.held) <= self.config.max_images
        for sub in plan.sub_batches:
            assert 1 <= len(sub.images) <= self.config.sub_batch_images
            for step in sub.images:
                assert self.live[step.image].group == sub.group
                assert (step.position == PREFILL) == (sub.phase == "prefill")

    def check_order(self, steps: dict[int, ImageStep], started: list[int]) -> None:
        """Nothing that started overtook one that still waits."""
        waiting = [task for image, task in self.live.items() if image not in steps]
        for image in started:
            task = self.live[image]
            assert all((w.priority, w.image) > (task.priority, image) for w in waiting)

    def check_parked(
        self,
        parked: list[int],
        before: dict[int, ImageStep],
        steps: dict[int, ImageStep],
        started: list[int],
    ) -> None:
        """Parked are batch images, for an interactive one, and all younger than those that stay."""
        assert all(self.live[image].priority is Priority.BATCH for image in parked)
        if parked:
            assert any(self.live[image].priority is Priority.INTERACTIVE for image in started)
            stayed = [i for i in before if i in steps and i not in parked]
            batch = [i for i in stayed if self.live[i].priority is Priority.BATCH]
            assert max(batch, default=-1) < min(parked)

    def check_no_head_waits_in_vain(self, steps: dict[int, ImageStep], started: list[int]) -> None:
        waiting = [task for image, task in self.live.items() if image not in steps]
        if not waiting or len(started) == self.config.max_prefill_images:
            return
        head = min(waiting, key=lambda task: (task.priority, task.image))
        stay = steps
        if head.priority is Priority.INTERACTIVE:
            stay = {i: s for i, s in steps.items() if self.live[i].priority is Priority.INTERACTIVE}
        enough = max(self.holes(stay), default=0) >= sum(map(rounded, head.sequence_bytes))
        assert not enough or len(stay) == self.config.max_images

    def holes(self, steps: dict[int, ImageStep]) -> list[int]:
        """Gaps in the arena around the slots of `steps`; fails if they overlap or leave it."""
        extents = sorted(
            (slot, rounded(size))
            for image, step in steps.items()
            for slot, size in zip(step.slots, self.live[image].sequence_bytes, strict=True)
        )
        edge, holes = 0, []
        for slot, size in [*extents, (CACHE_UNITS * UNIT, 0)]:
            assert slot >= edge, "sequences overlap"
            assert slot % UNIT == 0
            holes.append(slot - edge)
            edge = slot + size
        return [hole for hole in holes if hole]

    # -- the end -----------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        # Every step advances an image, and an image parked meanwhile repeats its tokens.
        bound = 2 * sum(task.tokens for task in self.live.values()) + 2
        for _ in range(bound + 1):
            if self.plan is not None:
                self.commit_step({})
            self.schedule()
            if self.plan is None:
                break
        assert self.plan is None, "the run does not come to an end"
        assert not self.live, "an image starves"
        assert self.ended == set(range(self.images))
        self.check_nothing_is_left()
        assert list(read(map(to_line, self.record))) == self.record
        again = Scheduler(self.config)
        assert [call(again) for call in self.calls] == self.answers, "not deterministic"

    def check_nothing_is_left(self) -> None:
        stats = self.scheduler.stats()
        assert self.scheduler.idle
        assert (stats.running, stats.waiting, stats.parked, stats.used_bytes) == (0, 0, 0, 0)
        assert stats.largest_free_bytes == stats.total_bytes
        totals = stats.totals
        assert totals.finished + totals.failed + totals.aborted == self.images
        assert totals.steps == self.steps


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,  # a busy machine is no failure
    suppress_health_check=[HealthCheck.too_slow],
)
