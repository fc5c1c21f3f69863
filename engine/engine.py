"""The engine: requests in, events out, one step at a time."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import lcm

import torch
from torch import Tensor

from engine.cache import KVArena
from engine.config import EngineConfig
from engine.events import Event, Failed, Finished, Partial, Progress
from engine.image import Image
from engine.intake import Intake
from engine.models.base import VisualModel
from engine.offload.start import check_start, load, open_offload
from engine.parallel.ranks import Command, Ranks
from engine.parallel.shard import Shard
from engine.partial import partial_due, unfinished
from engine.runner import Runner
from scheduler.config import SchedulerConfig
from scheduler.plan import StepPlan, StepResult
from scheduler.request import ImageRequest, PolicyChoice
from scheduler.scheduler import Scheduler
from sparse_attn.geometry import Grid
from sparse_attn.layout import ALIGNMENT

Listener = Callable[[Event], None]

LEARNED_PICTURES = 8
"""Finished pictures whose learnt reads are kept, for those who want to see them."""


@dataclass(slots=True)
class Counters:
    """What an engine has done since it started."""

    steps: int = 0
    tokens: int = 0
    finished: int = 0
    failed: int = 0
    aborted: int = 0
    kv_read_bytes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Learned:
    """What a policy had learnt when a picture was finished: its state of one sequence."""

    choice: PolicyChoice
    grid: Grid
    state: Tensor


class Engine:
    """Single-threaded: whoever calls `step` owns the device. See `engine.service` for threads."""

    def __init__(
        self, config: EngineConfig, model: VisualModel | None = None, shard: Shard | None = None
    ) -> None:
        """shard: which rank of a tensor-parallel engine this is; None is its leader, which starts
        the others. Raises what loading raises."""
        if config.threads:
            torch.set_num_threads(config.threads)
        self.config = config
        self.backend = config.resolved_backend
        check_start(config)
        self._commands: list[Command] = []
        alone, shard = shard is None, shard or Shard(0, config.tensor_parallel_size)
        self.ranks = Ranks(shard.size, config) if alone and not shard.whole else None
        self._leads = shard.rank == 0
        try:
            self._open(config, model, shard)
        except BaseException:
            self._close_ranks()
            raise

    def _open(self, config: EngineConfig, model: VisualModel | None, shard: Shard) -> None:
        if self.ranks is not None:
            self.ranks.join(config.device)
        options = replace(config.load_options, shard=shard, progress=self._leads)
        self.model, stream = (model, None) if model is not None else load(config, options)
        self.offload = open_offload(config, self.model, stream)
        self.scheduler = Scheduler(scheduler_config(config, self.model))
        arena = KVArena(config.resolved_cache_bytes - config.cache_on_disk, config.device)
        self.runner = Runner(self.model, arena, self.backend, self.offload)
        self.intake = Intake(self.model, config)
        self.counters = Counters()
        self.learned: OrderedDict[str, Learned] = OrderedDict()
        self._listeners: dict[int, Listener] = {}
        if self.ranks is not None:
            self.ranks.wait_until_loaded()

    def add(self, request: ImageRequest, listener: Listener) -> None:
        """Queue a request. Raises RequestError if this model cannot serve it."""
        images = self.intake.images(request)
        self.scheduler.add([self.intake.task(image) for image in images])
        for image in images:
            self.runner.images[image.number] = image
            self._listeners[image.number] = listener
        self._commands.append(("add", request))

    def abort(self, request_id: str) -> None:
        """Drop what is left of a request; unknown ids are ignored."""
        self._commands.append(("abort", request_id))
        images = [i for i in self.runner.images.values() if i.request.id == request_id]
        self.scheduler.abort(request_id)
        self.counters.aborted += len(images)
        for image in images:
            self._drop(image)

    def fail_all(self, reason: str) -> None:
        """Tell every listener that nothing more comes."""
        for image in list(self.runner.images.values()):
            self.scheduler.abort(image.request.id)
            self._fail(image, reason)

    def close(self) -> None:
        """Give back what is not memory: files, threads, other ranks. Idempotent."""
        self.offload.close()
        self._close_ranks()

    def fault(self) -> str | None:
        """Why nothing can be drawn any more, if that is so between steps."""
        return None if self.ranks is None else self.ranks.fault()

    def follow(self, commands: Sequence[Command]) -> None:
        """Do as the leader did: what was asked of it, then a step."""
        for what, about in commands:
            if what == "add":
                self.add(about, lambda event: None)
            else:
                self.abort(about)
        self._commands.clear()
        self.step()

    def step(self) -> bool:
        """Plan, run, commit, report. False when there is nothing to do."""
        self._lead()
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        self._mark_started(plan)
        result = self._run(plan)
        self._report(plan)
        for end in self.scheduler.commit(result):
            self._end(self.runner.images[end.image], end.failure)
        return True

    def _lead(self) -> None:
        """Take the other ranks along into this step."""
        if self.ranks is not None and (self._commands or self.runner.images):
            self.ranks.tell(self._commands)
        self._commands.clear()

    def _run(self, plan: StepPlan) -> StepResult:
        """Raises RuntimeError that names a rank whose end broke the step."""
        try:
            return self.runner.run(plan)
        except RuntimeError as error:
            fault = None if self.ranks is None else self.ranks.fault(1.0)
            if fault is None:
                raise
            raise RuntimeError(fault) from error

    def _close_ranks(self) -> None:
        if self.ranks is not None:
            self.ranks.close()

    def _mark_started(self, plan: StepPlan) -> None:
        now = time.monotonic()
        for sub in plan.sub_batches:
            for step in sub.images:
                image = self.runner.images[step.image]
                image.started = image.started or now

    def _report(self, plan: StepPlan) -> None:
        self.counters.steps += 1
        for sub in plan.sub_batches:
            for step in sub.images:
                if step.image in self.runner.images:
                    self.counters.tokens += 1
                    self._report_image(self.runner.images[step.image])

    def _report_image(self, image: Image) -> None:
        """Progress at the end of each row, and the partial pictures a request asked for."""
        if not (image.tokens and self._leads):
            return
        done, total = len(image.tokens), image.grid.tokens
        if done % image.grid.stride == 0:
            self._tell(image, Progress(image.index, done, total))
        number = partial_due(done, total, image.request.partial_images)
        if number is not None and done < total:
            pixels = unfinished(self.model, image.tokens, image.grid)
            self._tell(image, Partial(image.index, number, pixels.numpy()))

    def _end(self, image: Image, failure: str | None) -> None:
        if failure is None:
            self._finish(image)
        else:
            self._fail(image, failure)

    def _finish(self, image: Image) -> None:
        if not self._leads:
            self._drop(image)
            return
        tokens = torch.tensor(image.tokens)[None]
        pixels = self.model.decode_pixels(tokens, image.grid)[0].cpu().numpy()
        stats = image.stats(time.monotonic())
        self.counters.finished += 1
        self.counters.kv_read_bytes += stats.kv_read_bytes
        self._keep_learned(image)
        drawn = tuple(image.tokens)
        self._tell(image, Finished(image.index, image.seed, pixels, drawn, stats))
        self._drop(image)

    def _keep_learned(self, image: Image) -> None:
        """By the id of the request; of several pictures the last one finished stays."""
        state = self.runner.state_of(image)
        if state is not None:
            self.learned[image.request.id] = Learned(image.request.policy, image.grid, state)
            if len(self.learned) > LEARNED_PICTURES:
                self.learned.popitem(last=False)

    def _fail(self, image: Image, reason: str) -> None:
        self.counters.failed += 1
        self._tell(image, Failed(image.index, reason))
        self._drop(image)

    def _tell(self, image: Image, event: Event) -> None:
        self._listeners[image.number](event)

    def _drop(self, image: Image) -> None:
        self.runner.forget(image.number)
        del self.runner.images[image.number], self._listeners[image.number]


def scheduler_config(config: EngineConfig, model: VisualModel) -> SchedulerConfig:
    """The scheduler's share of an engine's configuration."""
    entry = config.format.entry_bytes(model.shape.head_dim)
    return SchedulerConfig(
        cache_bytes=config.resolved_cache_bytes,
        max_images=config.max_images,
        max_prefill_images=config.max_prefill_images,
        sub_batch_images=config.sub_batch_images,
        alignment=lcm(ALIGNMENT, entry),
    )
