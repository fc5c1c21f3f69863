"""Which images run in the next step, and where their cache lies.

The step loop against this class:

    scheduler.add(tasks)
    while (plan := scheduler.schedule()) is not None:
        runner.forget(plan.released)
        logits = runner.run(plan.sub_batches)
        failed = sampler.sample(logits)  # image -> reason
        for end in scheduler.commit(StepResult(plan.step, failed)):
            deliver(end)

Rules, in the order in which they decide:
1. The length of an image is known, so all of its memory is reserved when it is admitted and freed
   when its last token is committed: no step runs out of cache.
2. Interactive images come before batch images. Within a class, first come first served; nothing
   overtakes a head that does not fit, so a large image cannot be starved.
3. An interactive head that does not fit parks the youngest batch images, as few as make it fit,
   and none if even all of them would not do. Parked images return to the head of the batch line
   and start again; the same seed draws the same picture.
Nothing depends on time or hashing: the same calls give the same plans.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from scheduler.config import SchedulerConfig
from scheduler.memory import ExtentAllocator
from scheduler.plan import PREFILL, ImageStep, ImageTask, StepPlan, StepResult, SubBatch
from scheduler.queue import ImageQueue
from scheduler.request import Priority, RequestError
from scheduler.stats import SchedulerStats, Totals


@dataclass(frozen=True, slots=True)
class ImageEnd:
    """An image that is done: finished, or failed for the reason given."""

    image: int
    request: str
    failure: str | None = None


@dataclass(slots=True)
class _Running:
    """An admitted image. position: of its next step, as in `ImageStep`."""

    task: ImageTask
    slots: tuple[int, ...]
    position: int = PREFILL

    @property
    def done(self) -> bool:
        """Position t gives token t + 1, so the last position run is tokens - 2."""
        return self.position == self.task.tokens - 1


class Scheduler:
    """Plans steps for the images added. Not thread-safe: the engine's thread alone calls it."""

    def __init__(self, config: SchedulerConfig):
        self.config = config
        self._memory = ExtentAllocator(config.cache_bytes, config.alignment)
        self._queue = ImageQueue()
        self._running: dict[int, _Running] = {}  # in order of admission
        self._parked: set[int] = set()
        self._doomed: list[_Running] = []  # aborted during the step in flight, which may use them
        self._requests: dict[str, dict[int, ImageTask]] = {}  # images that have not ended
        self._tasks: dict[int, ImageTask] = {}  # the same, by number
        self._released: list[int] = []
        self._in_flight: StepPlan | None = None
        self._next_step = 0
        self._last_image = -1
        self._totals = Totals()

    # -- what the engine calls ---------------------------------------------------------------

    def add(self, tasks: Sequence[ImageTask]) -> None:
        """Queue images, in order; all of them or none.

        Raises RequestError if one could never fit in the cache, and ValueError if image numbers do
        not increase or a task has no token or no cache."""
        last = self._last_image
        for task in tasks:
            self._check(task, last)
            last = task.image
        for task in tasks:
            self._queue.push(task)
            self._tasks[task.image] = task
            self._requests.setdefault(task.request, {})[task.image] = task
        self._last_image = last

    def abort(self, request: str) -> list[int]:
        """End what is left of a request; returns the images ended, [] if there are none."""
        images = list(self._requests.get(request, ()))
        return [image for image in images if self.abort_image(image)]

    def abort_image(self, image: int) -> bool:
        """End one image; False if it is unknown or has ended.

        If it is in the step in flight, that step finishes and its result is ignored."""
        task = self._tasks.get(image)
        if task is None:
            return False
        running = self._running.pop(image, None)
        if running is None:
            self._queue.remove(task)
        elif self._in_flight is None:
            self._free(running)
        else:
            self._doomed.append(running)
        self._forget(task)
        self._totals.aborted += 1
        return True

    def schedule(self) -> StepPlan | None:
        """The next step, or None if there is nothing to do. Each plan must be committed.

        Raises RuntimeError if the last plan was not committed."""
        if self._in_flight is not None:
            raise RuntimeError(f"step {self._in_flight.step} is in flight: commit it first")
        self._admit()
        if not self._running and not self._released:
            return None
        plan = StepPlan(self._next_step, tuple(self._sub_batches()), tuple(self._released))
        self._released.clear()
        self._next_step += 1
        self._in_flight = plan
        return plan

    def commit(self, result: StepResult) -> list[ImageEnd]:
        """Advance the images of the step in flight; returns those that ended, in plan order.

        Raises ValueError (and changes nothing) if the result is not of that step."""
        images = self._images_of(result)
        self._in_flight = None
        self._totals.steps += 1
        for aborted in self._doomed:
            self._free(aborted)
        self._doomed.clear()
        running = [self._running[image] for image in images if image in self._running]
        return [end for image in running if (end := self._advance(image, result)) is not None]

    @property
    def idle(self) -> bool:
        """No image is left; a last plan may still report what was released."""
        return not self._tasks

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=len(self._running),
            waiting=len(self._queue) - len(self._parked),
            parked=len(self._parked),
            used_bytes=self._memory.used_bytes,
            total_bytes=self._memory.total_bytes,
            largest_free_bytes=self._memory.largest_free_bytes,
            totals=replace(self._totals),
        )

    # -- arrival -----------------------------------------------------------------------------

    def _check(self, task: ImageTask, last: int) -> None:
        if task.image <= last:
            raise ValueError(f"image {task.image} follows image {last}: numbers must increase")
        if task.tokens < 1 or not task.sequence_bytes or min(task.sequence_bytes) < 1:
            raise ValueError(f"image {task.image} has no token or no cache: {task}")
        if not self._memory.could_ever_fit(task.sequence_bytes):
            needed = sum(map(self._memory.rounded, task.sequence_bytes))
            raise RequestError(
                f"an image of this request needs {needed:,} bytes of KV cache "
                f"({len(task.sequence_bytes)} sequences) and the cache has "
                f"{self._memory.total_bytes:,}: choose a smaller size, a policy that keeps less "
                "resident or guidance_scale 1, or start the engine with a larger cache",
                "size",
                "kv_cache_exceeded",
            )

    # -- admission ---------------------------------------------------------------------------

    def _admit(self) -> None:
        for _ in range(self.config.max_prefill_images):
            task = self._queue.head()
            if task is None or not self._make_room(task):
                return
            slots = self._memory.allocate(task.sequence_bytes)
            assert slots is not None, "_make_room said that it fits"
            self._queue.remove(task)
            self._parked.discard(task.image)
            self._running[task.image] = _Running(task, slots)

    def _make_room(self, task: ImageTask) -> bool:
        if self._fits(task, self._memory, len(self._running)):
            return True
        victims = self._victims(task) if task.priority is Priority.INTERACTIVE else []
        for running in victims:
            self._park(running)
        return bool(victims)

    def _victims(self, task: ImageTask) -> list[_Running]:
        """The fewest youngest batch images whose leaving makes `task` fit; [] if none do."""
        trial, victims = self._memory.copy(), list[_Running]()
        for running in reversed(self._running.values()):
            if running.task.priority is Priority.BATCH:
                trial.free(running.slots)
                victims.append(running)
                if self._fits(task, trial, len(self._running) - len(victims)):
                    return victims
        return []

    def _fits(self, task: ImageTask, memory: ExtentAllocator, images: int) -> bool:
        return images < self.config.max_images and memory.fits(task.sequence_bytes)

    def _park(self, running: _Running) -> None:
        del self._running[running.task.image]
        self._free(running)
        self._queue.push_front(running.task)
        self._parked.add(running.task.image)
        self._totals.parked += 1

    # -- the plan ----------------------------------------------------------------------------

    def _sub_batches(self) -> Iterator[SubBatch]:
        """Decode before prefill; groups by their oldest admission; images in that order too."""
        rank: dict[str, int] = {}
        for running in self._running.values():
            rank.setdefault(running.task.group, len(rank))

        def key(running: _Running) -> tuple[bool, int]:
            return running.position == PREFILL, rank[running.task.group]

        for (prefill, _), members in groupby(sorted(self._running.values(), key=key), key):
            yield from self._split(list(members), prefill)

    def _split(self, members: list[_Running], prefill: bool) -> Iterator[SubBatch]:
        group, size = members[0].task.group, self.config.sub_batch_images
        for start in range(0, len(members), size):
            steps = (
                ImageStep(m.task.image, m.position, m.slots) for m in members[start : start + size]
            )
            yield SubBatch(group, "prefill" if prefill else "decode", tuple(steps))

    # -- results -----------------------------------------------------------------------------

    def _images_of(self, result: StepResult) -> list[int]:
        plan = self._in_flight
        if plan is None or result.step != plan.step:
            expected = "no step" if plan is None else f"step {plan.step}"
            raise ValueError(f"a result of step {result.step} came, {expected} is in flight")
        images = [step.image for batch in plan.sub_batches for step in batch.images]
        if strangers := sorted(result.failed.keys() - set(images)):
            raise ValueError(f"step {plan.step} reports failed images it did not run: {strangers}")
        return images

    def _advance(self, running: _Running, result: StepResult) -> ImageEnd | None:
        task = running.task
        failure = result.failed.get(task.image)
        if failure is None:
            running.position += 1
            self._totals.tokens += 1
            if not running.done:
                return None
        self._totals.finished += failure is None
        self._totals.failed += failure is not None
        del self._running[task.image]
        self._free(running)
        self._forget(task)
        return ImageEnd(task.image, task.request, failure)

    # -- leaving -----------------------------------------------------------------------------

    def _free(self, running: _Running) -> None:
        """Give the cache of an image back; the next plan tells the engine."""
        self._memory.free(running.slots)
        self._released.append(running.task.image)

    def _forget(self, task: ImageTask) -> None:
        self._parked.discard(task.image)
        del self._tasks[task.image]
        siblings = self._requests[task.request]
        del siblings[task.image]
        if not siblings:
            del self._requests[task.request]
