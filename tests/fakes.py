"""An `ImageService` without a model: a worker thread that draws all running images in steps, as
the engine does, and pictures that depend on the seed alone."""

import asyncio
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.events import Event, Failed, Finished, ImageStats, Partial, Progress
from engine.policy_info import GridInfo, PolicyCatalog, PolicyInfo, PolicyOption, ReadSet
from engine.service_api import EngineStats, Health, ModelInfo, ReadQuery
from scheduler.request import ImageRequest, RequestError, Sampling

MODEL = ModelInfo(
    name="fake",
    sizes=((32, 32), (64, 48)),
    visual_tokens=16,
    prompt_limit="30 words",
    sampling=Sampling(guidance_scale=4.0, top_p=0.9),
    policies=("dense", "diagonal"),
    backend="reference",
    device="cpu",
    dtype="fp32",
)
WORDS = 30
GRID = GridInfo(4, 4, 0)


@dataclass(eq=False)
class Job:
    """A request in the fake engine; `tell` hands an event (None: the end) to its reader."""

    request: ImageRequest
    tell: queue.SimpleQueue[Event | None] | None = None
    loop: asyncio.AbstractEventLoop | None = None
    events: asyncio.Queue[Event | None] = field(default_factory=asyncio.Queue)
    done: int = 0
    aborted: bool = False

    def say(self, event: Event | None) -> None:
        if self.tell is not None:
            self.tell.put(event)
        else:
            assert self.loop is not None
            if self.loop.is_closed():
                return
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)


class Stream:
    """The async iterator of one job; closing it aborts the job."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Event:
        event = await self.job.events.get()
        if event is None:
            raise StopAsyncIteration
        return event

    async def aclose(self) -> None:
        self.job.aborted = True


class FakeService:
    """step_seconds: how long one step of all running jobs takes. Tests steer it by attributes:
    `frozen` stops the steps, `failing` fails the images of that index, `dead` and `stuck_seconds`
    are what `health` reports."""

    def __init__(self, step_seconds: float = 0.001) -> None:
        self.step_seconds = step_seconds
        self.frozen = False
        self.failing: int | None = None
        self.dead = False
        self.stuck_seconds = 0.0
        self.seen: list[ImageRequest] = []
        self.queries: list[ReadQuery] = []
        self.together = 0
        self.steps = self.finished = self.aborted = self.failed = 0
        self._jobs: list[Job] = []
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread()

    @property
    def model(self) -> ModelInfo:
        return MODEL

    def start(self) -> None:
        self._stopping.clear()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def check(self, request: ImageRequest) -> None:
        if len(request.prompt.split()) > WORDS:
            raise RequestError(f"the prompt has more than {WORDS} words", "prompt", "too_long")

    def stream(self, request: ImageRequest) -> Stream:
        job = Job(request, loop=asyncio.get_running_loop())
        self._submit(job)
        return Stream(job)

    def run(self, requests: Sequence[ImageRequest]) -> Iterator[tuple[int, Event]]:
        jobs = [Job(request, tell=queue.SimpleQueue()) for request in requests]
        for job in jobs:
            self._submit(job)
        try:
            for index, job in enumerate(jobs):
                assert job.tell is not None
                while (event := job.tell.get()) is not None:
                    yield index, event
        finally:
            for job in jobs:
                job.aborted = True

    def policies(self) -> PolicyCatalog:
        sink = PolicyOption("sink", ("int",), 0, False, "leading keys that stay")
        file = PolicyOption("file", ("str",), None, False, "a calibrated file")
        infos = (
            PolicyInfo("dense", "Reads every key.", False, (), None),
            PolicyInfo("diagonal", "Reads diagonals.", True, (sink, file), None),
        )
        return PolicyCatalog(2, 3, dict.fromkeys(MODEL.sizes, GRID), infos)

    def read_set(self, query: ReadQuery) -> ReadSet:
        self.queries.append(query)
        if query.layer >= 2:
            raise RequestError("layer must lie in 0..1", "layer")
        whole = ((0, query.position),)
        return ReadSet(GRID, query.layer, query.head, query.position, whole, whole, source="fixed")

    def health(self) -> Health:
        return Health(not self.dead, self.stuck_seconds, "boom" if self.dead else None)

    def stats(self) -> EngineStats:
        running = sum(job.request.n for job in self._jobs)
        return EngineStats(
            images_running=running,
            images_waiting=0,
            cache_bytes_used=running * 100,
            cache_bytes_total=1000,
            steps=self.steps,
            tokens=self.steps,
            images_finished=self.finished,
            images_failed=self.failed,
            images_aborted=self.aborted,
            images_parked=0,
            kv_read_bytes=self.finished * 1000,
        )

    def _submit(self, job: Job) -> None:
        self.check(job.request)
        with self._lock:
            self.seen.append(job.request)
            self._jobs.append(job)

    def _work(self) -> None:
        while not self._stopping.wait(self.step_seconds):
            if not self.frozen:
                self._step()
        for job in self._jobs:
            job.say(None)

    def _step(self) -> None:
        with self._lock:
            self.aborted += sum(job.request.n for job in self._jobs if job.aborted)
            self._jobs = [job for job in self._jobs if not job.aborted]
            self.together = max(self.together, len(self._jobs))
            self.steps += bool(self._jobs)
            for job in self._jobs:
                self._advance(job)
            self._jobs = [job for job in self._jobs if job.done < MODEL.visual_tokens]

    def _advance(self, job: Job) -> None:
        job.done += 1
        for index in range(job.request.n):
            job.say(Progress(index, job.done, MODEL.visual_tokens))
            part = _part_at(job.done, job.request.partial_images)
            if part is not None:
                job.say(Partial(index, part, picture(job.request, index)))
            if job.done == MODEL.visual_tokens:
                job.say(self._end(job.request, index))
        if job.done == MODEL.visual_tokens:
            job.say(None)

    def _end(self, request: ImageRequest, index: int) -> Event:
        if index == self.failing:
            self.failed += 1
            return Failed(index, "the logits are not finite")
        self.finished += 1
        return finished(request, index)


def _part_at(done: int, parts: int) -> int | None:
    """The number of the partial picture due after `done` tokens."""
    for number in range(parts):
        if done == (number + 1) * MODEL.visual_tokens // (parts + 1):
            return number
    return None


def picture(request: ImageRequest, index: int) -> np.ndarray:
    """A picture that depends on its seed and size alone."""
    width, height = request.size or MODEL.sizes[0]
    random = np.random.default_rng(request.seed + index)
    small = random.integers(0, 256, (height // 16, width // 16, 3), np.uint8)
    return small.repeat(16, 0).repeat(16, 1)


def finished(request: ImageRequest, index: int) -> Finished:
    dense = request.policy.name == "dense"
    stats = ImageStats(
        tokens=MODEL.visual_tokens,
        prompt_tokens=len(request.prompt.split()),
        seconds=0.5,
        queue_seconds=0.1,
        kv_read_bytes=4000 if dense else 1000,
        kv_resident_bytes=2000,
        density=1.0 if dense else 0.25,
    )
    pixels = picture(request, index)
    return Finished(index, request.seed + index, pixels, tuple(range(MODEL.visual_tokens)), stats)


def wait_until(condition: object, seconds: float = 5.0) -> bool:
    """Whether `condition()` became true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.005)
    return False
