"""Replicas in this process that draw when they are told to, and die, hang or lag on command."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from engine.events import Event, Failed, Partial, Progress
from engine.policy_info import ReadSet
from engine.replicas.replica import Facts, ReplicaLost, Report
from engine.service_api import EngineStats, Health, ReadQuery
from scheduler.request import ImageRequest, RequestError
from tests.fakes import MODEL, FakeService, finished, picture

IMAGE_BYTES = 100
TOKENS = MODEL.visual_tokens


@dataclass(eq=False)
class FakeReplica:
    """Draws all that it was given at once, one token a step, if `steps` lets it.

    dead, silent, broken, stuck_seconds: how it fails. failing: seeds whose pictures fail. deadly:
    seeds that kill it. lies: events of pictures it was never given.
    """

    name: str
    room: int
    step_seconds: float
    cache_images: int
    dead: bool = False
    silent: bool = False
    broken: str | None = None
    stuck_seconds: float = 0.0
    frozen: bool = False
    closed: bool = False
    failing: frozenset[int] = frozenset()
    deadly: frozenset[int] = frozenset()
    steps: int = 0
    given: list[ImageRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    lies: list[tuple[str, Event]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._work: dict[str, tuple[ImageRequest, int]] = {}
        self._lock = threading.Lock()
        self._finished = 0

    @property
    def facts(self) -> Facts:
        return Facts(MODEL, FakeService().policies(), "here", id(self) % 10_000, self.room)

    @property
    def drawing(self) -> list[str]:
        with self._lock:
            return list(self._work)

    def submit(self, request: ImageRequest) -> None:
        self._alive()
        with self._lock:
            self.given.append(request)
            self._work[request.id] = (request, 0)
        self.dead = self.dead or request.seed in self.deadly

    def abort(self, id: str) -> None:
        self._alive()
        with self._lock:
            self.aborted.append(id)
            self._work.pop(id, None)

    def collect(self, seconds: float) -> Report:
        self._alive()
        time.sleep(self.step_seconds)
        if self.silent:
            raise ReplicaLost("it has not answered for 0 s")
        with self._lock:
            events = self._last_words() if self.broken else self._step()
            stats = self._stats()
        self._alive()
        health = Health(not self.broken, self.stuck_seconds, self.broken)
        return Report(tuple(events), health, stats)

    def check(self, request: ImageRequest) -> None:
        self._alive()
        FakeService().check(request)

    def read_set(self, query: ReadQuery) -> ReadSet:
        self._alive()
        return replace(FakeService().read_set(query), head=int(self.name.split("-")[1]))

    def close(self) -> None:
        self.closed = self.dead = True

    def _alive(self) -> None:
        if self.dead:
            raise ReplicaLost("killed")

    def _step(self) -> list[tuple[str, Event | Exception]]:
        events: list[tuple[str, Event | Exception]] = list(self.lies)
        if self.frozen:
            return events
        self.steps += bool(self._work)
        for id, (request, done) in list(self._work.items())[: self.cache_images]:
            if "refuse" in request.prompt:
                del self._work[id]
                events.append((id, RequestError("no", "prompt")))
                continue
            self._work[id] = (request, done + 1)
            events.append((id, Progress(0, done + 1, TOKENS)))
            events += [(id, event) for event in self._more(request, done + 1)]
            if done + 1 == TOKENS:
                del self._work[id]
        return events

    def _more(self, request: ImageRequest, done: int) -> list[Event]:
        events: list[Event] = []
        parts = request.partial_images
        events += [
            Partial(0, number, picture(request, 0))
            for number in range(parts)
            if done == (number + 1) * TOKENS // (parts + 1)
        ]
        if done == TOKENS:
            fails = "fail" in request.prompt or request.seed in self.failing
            events.append(Failed(0, "NaN") if fails else finished(request, 0))
            self._finished += 1
        return events

    def _last_words(self) -> list[tuple[str, Event | Exception]]:
        return [(id, Failed(0, "the engine died")) for id in self._work]

    def _stats(self) -> EngineStats:
        running = min(len(self._work), self.cache_images)
        waiting = len(self._work) - running
        used, total = running * IMAGE_BYTES, self.cache_images * IMAGE_BYTES
        return EngineStats(running, waiting, used, total, 0, 0, self._finished, 0, 0, 0, 0)


@dataclass(eq=False)
class FakeSpawn:
    """Makes fake replicas, at first in the order of their names, so that `made[k]` is replica-k.
    `fails`: how the next starts fail. `held`: starts wait."""

    room: int = 4
    step_seconds: float = 0.0005
    cache_images: int = 4
    fails: list[Exception] = field(default_factory=list)
    held: bool = False
    made: list[FakeReplica] = field(default_factory=list)
    prepare: Callable[[FakeReplica], None] = lambda replica: None
    _tried: set[str] = field(default_factory=set)

    def __call__(self, name: str, wanted: Callable[[], bool]) -> FakeReplica | None:
        number = int(name.split("-")[1])
        while (self.held or number > len(self._tried)) and wanted():
            time.sleep(0.002)
        try:
            return self._make(name, wanted)
        finally:
            self._tried.add(name)

    def _make(self, name: str, wanted: Callable[[], bool]) -> FakeReplica | None:
        if not wanted():
            return None
        if self.fails:
            raise self.fails.pop(0)
        replica = FakeReplica(name, self.room, self.step_seconds, self.cache_images)
        self.prepare(replica)
        self.made.append(replica)
        return replica

    def now(self, name: str) -> FakeReplica:
        """The latest of a name."""
        return next(each for each in reversed(self.made) if each.name == name)
