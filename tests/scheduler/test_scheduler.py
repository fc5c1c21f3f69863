"""What the scheduler promises, rule by rule. Sizes are in units of the cache alignment."""

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.config import CACHE_ALIGNMENT as UNIT
from scheduler.config import SchedulerConfig
from scheduler.plan import PREFILL, ImageTask, StepPlan, StepResult
from scheduler.request import Priority, RequestError
from scheduler.scheduler import ImageEnd, Scheduler

INTERACTIVE, BATCH = Priority.INTERACTIVE, Priority.BATCH


def scheduler(cache: int = 100, **limits: int) -> Scheduler:
    return Scheduler(SchedulerConfig(cache_bytes=cache * UNIT, **limits))


def task(
    image: int,
    *sizes: int,
    tokens: int = 3,
    priority: Priority = INTERACTIVE,
    request: str | None = None,
    group: str = "g",
) -> ImageTask:
    sequence_bytes = tuple(size * UNIT for size in sizes or (10,))
    return ImageTask(image, request or f"r{image}", group, tokens, sequence_bytes, priority)


def batch(image: int, *sizes: int, tokens: int = 3) -> ImageTask:
    return task(image, *sizes, tokens=tokens, priority=BATCH)


def positions(plan: StepPlan | None) -> dict[int, int]:
    assert plan is not None
    return {step.image: step.position for sub in plan.sub_batches for step in sub.images}


def step(scheduler: Scheduler, failed: dict[int, str] | None = None) -> tuple[StepPlan, list[int]]:
    plan = scheduler.schedule()
    assert plan is not None
    ends = scheduler.commit(StepResult(plan.step, failed or {}))
    return plan, [end.image for end in ends]


def drain(scheduler: Scheduler) -> list[int]:
    ended = list[int]()
    for _ in range(1000):
        if (plan := scheduler.schedule()) is None:
            return ended
        ended += [end.image for end in scheduler.commit(StepResult(plan.step))]
    raise AssertionError("the scheduler does not come to an end")


def largest_hole(at: dict[int, int], sizes: list[int], stay: list[int]) -> int:
    """Largest free extent of an arena of 100 if only the images `stay` lie in it."""
    taken = {unit for i in stay for unit in range(at[i], at[i] + sizes[i])}
    free = "".join(" x"[unit in taken] for unit in range(100))
    return max(map(len, free.split("x")))


def shape(plan: StepPlan) -> list[tuple[str, str, list[int]]]:
    return [(sub.group, sub.phase, [s.image for s in sub.images]) for sub in plan.sub_batches]


class TestLifeOfAnImage:
    @pytest.mark.parametrize("tokens", [1, 2, 3, 7])
    def test_takes_one_prefill_and_tokens_minus_one_decode_steps(self, tokens: int) -> None:
        s = scheduler()
        s.add([task(0, tokens=tokens)])
        seen = []
        for _ in range(tokens):
            plan, ended = step(s)
            seen.append(positions(plan)[0])
        assert seen == [PREFILL, *range(tokens - 1)]
        assert ended == [0]
        assert s.idle
        assert s.stats().totals.tokens == tokens

    def test_reserves_all_sequences_at_once_and_frees_them_with_the_last_token(self) -> None:
        s = scheduler()
        s.add([task(0, 30, 40, tokens=2)])
        plan, _ = step(s)
        assert len(plan.sub_batches[0].images[0].slots) == 2
        assert s.stats().used_bytes == 70 * UNIT
        assert step(s)[1] == [0]
        assert s.stats().used_bytes == 0

    def test_keeps_its_slots_for_life(self) -> None:
        s = scheduler()
        s.add([task(0, 5, 5, tokens=4), task(1, 5, 5, tokens=2)])
        slots = {step(s)[0].sub_batches[0].images[0].slots for _ in range(4)}
        assert len(slots) == 1

    def test_is_reported_released_once_after_its_end(self) -> None:
        s = scheduler()
        s.add([task(0, tokens=1)])
        assert step(s)[0].released == ()
        last = s.schedule()
        assert last == StepPlan(1, (), (0,))
        assert s.commit(StepResult(1)) == []
        assert s.schedule() is None

    def test_joins_while_others_are_in_the_middle(self) -> None:
        s = scheduler()
        s.add([task(0)])
        step(s)
        s.add([task(1)])
        assert positions(step(s)[0]) == {0: 0, 1: PREFILL}
        assert positions(step(s)[0]) == {0: 1, 1: 0}
        assert positions(step(s)[0]) == {1: 1}

    def test_nothing_to_do_is_none(self) -> None:
        s = scheduler()
        assert s.schedule() is None
        assert s.idle
        s.add([])
        assert s.schedule() is None


class TestOrder:
    def test_first_come_first_served(self) -> None:
        s = scheduler(cache=10)
        s.add([task(i, tokens=1) for i in range(4)])
        assert drain(s) == [0, 1, 2, 3]

    def test_nothing_overtakes_a_head_that_does_not_fit(self) -> None:
        s = scheduler()
        s.add([task(0, 60), task(1, 60), task(2, 10), batch(3, 10)])
        assert [positions(step(s)[0]).keys() for _ in range(3)] == [{0}] * 3
        assert positions(step(s)[0]).keys() == {1, 2, 3}

    def test_interactive_before_batch(self) -> None:
        s = scheduler(max_prefill_images=1)
        s.add([batch(0), batch(1), task(2)])
        order = [image for _ in range(3) for image, at in positions(step(s)[0]).items() if at < 0]
        assert order == [2, 0, 1]

    def test_a_stream_of_small_requests_does_not_starve_a_large_one(self) -> None:
        s = scheduler()
        s.add([task(i, 10, tokens=5) for i in range(10)])
        step(s), step(s)
        s.add([task(10, 100, tokens=1)])
        for image in range(11, 30):
            s.add([task(image, 10, tokens=5)])
            plan, _ = step(s)
            if 10 in positions(plan):
                break
        assert image <= 16  # no later than when those before it have ended

    def test_images_of_one_request_share_the_line_with_others(self) -> None:
        s = scheduler(cache=20)
        s.add([task(0, request="a", tokens=1), task(1, request="a", tokens=2)])
        s.add([task(2, tokens=1), task(3, tokens=1)])
        assert drain(s) == [0, 1, 2, 3]

    def test_prefill_is_chunked(self) -> None:
        s = scheduler(max_prefill_images=2)
        s.add([task(i) for i in range(5)])
        assert positions(step(s)[0]) == {0: PREFILL, 1: PREFILL}
        assert positions(step(s)[0]) == {0: 0, 1: 0, 2: PREFILL, 3: PREFILL}

    def test_max_images_limits_those_in_flight(self) -> None:
        s = scheduler(max_images=2)
        s.add([task(i, 1) for i in range(5)])
        assert positions(step(s)[0]).keys() == {0, 1}
        assert drain(s) == [0, 1, 2, 3, 4]


class TestSubBatches:
    def test_split_by_group_phase_and_size(self) -> None:
        s = scheduler(sub_batch_images=2)
        s.add([task(0, group="z"), task(1, group="a"), task(2, group="z"), task(3, group="z")])
        step(s)
        s.add([task(4, group="a"), task(5, group="z")])
        assert shape(step(s)[0]) == [
            ("z", "decode", [0, 2]),
            ("z", "decode", [3]),
            ("a", "decode", [1]),
            ("z", "prefill", [5]),
            ("a", "prefill", [4]),
        ]

    def test_order_within_a_group_is_stable(self) -> None:
        s = scheduler()
        s.add([task(i, 1, tokens=2 if i == 1 else 9) for i in range(4)])
        step(s), step(s)
        assert shape(step(s)[0]) == [("g", "decode", [0, 2, 3])]


class TestParking:
    def test_parks_the_youngest_batch_image_and_restarts_it(self) -> None:
        s = scheduler()
        s.add([batch(0, 50), batch(1, 50)])
        step(s)
        s.add([task(2, 40, tokens=1)])
        plan, ended = step(s)
        assert positions(plan) == {0: 0, 2: PREFILL}
        assert plan.released == (1,)
        assert s.stats().parked == 1
        assert ended == [2]
        assert positions(step(s)[0]) == {0: 1, 1: PREFILL}
        assert s.stats().parked == 0
        assert s.stats().totals.parked == 1
        assert drain(s) == [1]

    def test_parks_as_few_as_make_it_fit(self) -> None:
        s = scheduler()
        s.add([batch(i, 20) for i in range(5)])
        step(s)
        s.add([task(5, 35)])
        assert step(s)[0].released == (4, 3)

    @settings(deadline=None)
    @given(st.data())
    def test_parks_exactly_the_shortest_run_of_youngest_that_makes_room(
        self, data: st.DataObject
    ) -> None:
        sizes = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=12))
        s = scheduler(max_prefill_images=20)
        s.add([batch(i, size, tokens=data.draw(st.integers(1, 9))) for i, size in enumerate(sizes)])
        ended = set(step(s)[1])
        plan, more = step(s)
        ended |= set(more)
        slots = {i.image: i.slots[0] // UNIT for b in plan.sub_batches for i in b.images}
        at = {image: slot for image, slot in slots.items() if image not in ended}
        size = data.draw(st.integers(1, 100))
        s.add([task(20, size)])
        plan, _ = step(s)
        youngest = sorted(at, reverse=True)
        counts = range(len(youngest) + 1)
        fewest = next(n for n in counts if largest_hole(at, sizes, youngest[n:]) >= size)
        assert [i for i in plan.released if i in at] == youngest[:fewest]

    def test_parks_none_when_even_all_would_not_do(self) -> None:
        s = scheduler()
        s.add([task(0, 60, tokens=9), batch(1, 40, tokens=9)])
        step(s)
        s.add([task(2, 50)])
        plan, _ = step(s)
        assert positions(plan).keys() == {0, 1}
        assert plan.released == ()

    def test_never_parks_an_interactive_image(self) -> None:
        s = scheduler()
        s.add([task(0, 60), batch(1, 30)])
        step(s)
        s.add([task(2, 40)])
        assert step(s)[0].released == (1,)
        s.add([task(3, 40)])
        assert positions(step(s)[0]).keys() == {0, 2}

    def test_makes_room_under_max_images_too(self) -> None:
        s = scheduler(max_images=2)
        s.add([batch(0), batch(1)])
        step(s)
        s.add([task(2)])
        plan, _ = step(s)
        assert positions(plan).keys() == {0, 2}
        assert plan.released == (1,)

    def test_parked_images_return_to_the_head_in_their_order(self) -> None:
        s = scheduler(max_prefill_images=1)
        s.add([batch(0, 30), batch(1, 30), batch(2, 30), batch(3, 30)])
        step(s), step(s), step(s)
        s.add([task(4, 100, tokens=1)])
        assert step(s)[0].released == (0, 2, 1)
        starts = [i for _ in range(3) for i, at in positions(step(s)[0]).items() if at == PREFILL]
        assert starts == [1, 2, 3]

    def test_a_batch_image_parks_nobody(self) -> None:
        s = scheduler()
        s.add([batch(0, 60)])
        step(s)
        s.add([batch(1, 60)])
        assert positions(step(s)[0]).keys() == {0}

    def test_an_interactive_image_waits_one_step_at_most(self) -> None:
        s = scheduler()
        s.add([batch(i, 10, tokens=1000) for i in range(20)])
        step(s), step(s)
        in_flight = s.schedule()
        assert in_flight is not None
        s.add([task(20, 25)])
        s.commit(StepResult(in_flight.step))
        assert positions(step(s)[0])[20] == PREFILL


class TestAbort:
    def test_of_a_queued_image_tells_the_engine_nothing(self) -> None:
        s = scheduler()
        s.add([task(0)])
        assert s.abort("r0") == [0]
        assert s.idle
        assert s.schedule() is None

    def test_of_a_running_request_frees_its_memory_at_once(self) -> None:
        s = scheduler()
        s.add([task(0, request="a"), task(1, request="a"), task(2)])
        step(s)
        assert s.abort("a") == [0, 1]
        assert s.stats().used_bytes == 10 * UNIT
        plan, _ = step(s)
        assert positions(plan) == {2: 0}
        assert plan.released == (0, 1)

    def test_of_a_parked_image(self) -> None:
        s = scheduler()
        s.add([batch(0, 90)])
        step(s)
        s.add([task(1, 90)])
        assert step(s)[0].released == (0,)
        assert s.abort_image(0)
        assert s.stats().parked == 0
        assert drain(s) == [1]
        assert s.idle

    def test_between_schedule_and_commit_ignores_the_result(self) -> None:
        s = scheduler()
        s.add([task(0, tokens=1), task(1, tokens=1), task(2, tokens=1)])
        plan = s.schedule()
        assert plan is not None
        assert s.abort("r0") == [0]
        assert s.abort_image(1)
        assert s.stats().used_bytes == 30 * UNIT  # the step in flight still uses it
        assert s.commit(StepResult(plan.step, {1: "nan"})) == [ImageEnd(2, "r2")]
        assert s.stats().used_bytes == 0
        assert step(s)[0].released == (0, 1, 2)

    def test_of_the_unknown_and_the_ended_does_nothing(self) -> None:
        s = scheduler()
        s.add([task(0, tokens=1)])
        step(s)
        assert s.abort("r0") == []
        assert s.abort("nobody") == []
        assert not s.abort_image(0)
        assert not s.abort_image(99)
        assert s.stats().totals.aborted == 0

    def test_of_one_image_leaves_the_others_of_its_request(self) -> None:
        s = scheduler()
        s.add([task(0, request="a"), task(1, request="a")])
        assert s.abort_image(0)
        assert not s.abort_image(0)
        assert drain(s) == [1]

    def test_lets_the_next_in_line_start(self) -> None:
        s = scheduler()
        s.add([task(0, 90, tokens=100), task(1, 90)])
        step(s)
        s.abort("r0")
        assert positions(step(s)[0]) == {1: PREFILL}


class TestFailure:
    def test_ends_that_image_alone_and_frees_its_memory_at_once(self) -> None:
        s = scheduler()
        s.add([task(0), task(1)])
        plan = s.schedule()
        assert plan is not None
        assert s.commit(StepResult(plan.step, {1: "nan"})) == [ImageEnd(1, "r1", "nan")]
        assert s.stats().used_bytes == 10 * UNIT
        plan, _ = step(s)
        assert positions(plan) == {0: 0}
        assert plan.released == (1,)

    def test_ends_come_in_plan_order(self) -> None:
        s = scheduler()
        s.add([task(i, tokens=1) for i in range(5)])
        assert step(s, {3: "x", 1: "y"})[1] == [0, 1, 2, 3, 4]
        assert (s.stats().totals.finished, s.stats().totals.failed) == (3, 2)


class TestRefusals:
    def test_of_an_image_that_could_never_fit(self) -> None:
        s = scheduler(cache=10)
        with pytest.raises(RequestError, match=r"2,816 bytes.*2,560.*smaller size") as error:
            s.add([task(0), task(1, 6, 5)])
        assert error.value.param == "size"
        assert s.idle  # all or none
        s.add([task(0, 5, 5)])
        assert drain(s) == [0]

    @pytest.mark.parametrize("numbers", [(0, 0), (1, 0)])
    def test_of_numbers_that_do_not_increase(self, numbers: Iterable[int]) -> None:
        with pytest.raises(ValueError, match="must increase"):
            scheduler().add([task(number) for number in numbers])
        s = scheduler()
        s.add([task(1)])
        s.abort_image(1)
        with pytest.raises(ValueError, match="must increase"):  # a number is never used again
            s.add([task(number) for number in numbers])

    @pytest.mark.parametrize(
        "bad",
        [
            ImageTask(0, "r", "g", 0, (1,)),
            ImageTask(0, "r", "g", 1, ()),
            ImageTask(0, "r", "g", 1, (1, 0)),
        ],
    )
    def test_of_empty_tasks(self, bad: ImageTask) -> None:
        with pytest.raises(ValueError, match="no token or no cache"):
            scheduler().add([bad])

    def test_of_a_second_plan_before_the_first_is_committed(self) -> None:
        s = scheduler()
        s.add([task(0)])
        s.schedule()
        with pytest.raises(RuntimeError, match="step 0 is in flight"):
            s.schedule()

    def test_of_results_that_do_not_belong_to_the_step(self) -> None:
        s = scheduler()
        with pytest.raises(ValueError, match="no step is in flight"):
            s.commit(StepResult(0))
        s.add([task(0)])
        s.schedule()
        with pytest.raises(ValueError, match="step 1 came, step 0"):
            s.commit(StepResult(1))
        with pytest.raises(ValueError, match=r"did not run: \[7\]"):
            s.commit(StepResult(0, {7: "nan"}))
        assert s.commit(StepResult(0)) == []


@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True])
@pytest.mark.parametrize("name", ["cache_bytes", "max_images", "sub_batch_images"])
def test_config_refuses_by_name(name: str, value: object) -> None:
    limits = {"cache_bytes": 1 << 20, name: value}
    with pytest.raises(ValueError, match=name):
        SchedulerConfig(**limits)  # type: ignore[arg-type]


def test_config_refuses_a_cache_that_holds_nothing() -> None:
    with pytest.raises(ValueError, match="no image fits"):
        SchedulerConfig(cache_bytes=UNIT - 1)
