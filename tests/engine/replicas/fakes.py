"""Replicas without a model, which die, hang and refuse as they are told."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.events import Event, Failed, Finished, Partial, Progress
from engine.policy_info import ReadSet
from engine.replicas.replica import Facts, ReplicaLost, ReplicaRefused, Report
from engine.service_api import EngineStats, Health, ReadQuery
from scheduler.request import ImageRequest, RequestError
from tests import fakes

STEPS = 8
BYTES = 100


@dataclass(eq=False)
class FakeReplica:
    """A step of everything takes `step_seconds`. Steered by attributes: `dead` (no answer at all),
    `engine_dead` (it says so, and fails what it drew), `stuck`, `frozen` (no steps), `failing`
    (seeds whose pictures fail), `refusing` (prompts that the model refuses)."""

    name: str
    room: int = 4
    step_seconds: float = 0.001
    dead: bool = False
    engine_dead: bool = False
    stuck: bool = False
    frozen: bool = False
    failing: frozenset[int] = frozenset()
    closed: bool = False
    seen: list[ImageRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    drawing: dict[str, tuple[ImageRequest, int]] = field(default_factory=dict)
    steps: int = 0
    finished: int = 0
    _told: list[tuple[str, Event | Exception]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def facts(self) -> Facts:
        catalog = fakes.FakeService().policies()
        return Facts(fakes.MODEL, catalog, "here", 1, self.room)

    def submit(self, request: ImageRequest) -> None:
        self._answer()
        with self._lock:
            self.seen.append(request)
            if len(request.prompt.split()) > fakes.WORDS:
                self._told.append((request.id, RequestError("too many words", "prompt")))
            else:
                self.drawing[request.id] = (request, 0)

    def abort(self, id: str) -> None:
        self._answer()
        with self._lock:
            self.aborted.append(id)
            self.drawing.pop(id, None)

    def collect(self, seconds: float) -> Report:
        time.sleep(self.step_seconds)
        self._answer()
        with self._lock:
            if self.engine_dead:
                lost = "the engine died: boom"
                self._told += [(id, Failed(0, lost)) for id in self.drawing]
            elif not self.frozen:
                self._step()
            told, self._told = tuple(self._told), []
        return Report(told, self.health(), self.stats())

    def check(self, request: ImageRequest) -> None:
        self._answer()
        fakes.FakeService().check(request)

    def read_set(self, query: ReadQuery) -> ReadSet:
        self._answer()
        whole = ((0, query.position),)
        return ReadSet(
            fakes.GRID, query.layer, query.head, query.position, whole, whole, source="fixed"
        )

    def close(self) -> None:
        self.closed = True

    def health(self) -> Health:
        stuck = 1000.0 if self.stuck else 0.0
        return Health(not self.engine_dead, stuck, "boom" if self.engine_dead else None)

    def stats(self) -> EngineStats:
        running = len(self.drawing)
        used, total = running * BYTES, self.room * BYTES
        done = self.finished
        return EngineStats(running, 0, used, total, self.steps, self.steps, done, 0, 0, 0, 0)

    def _answer(self) -> None:
        if self.dead or self.closed:
            raise ReplicaLost("no answer")

    def _step(self) -> None:
        self.steps += bool(self.drawing)
        for id, (request, done) in list(self.drawing.items()):
            self.drawing[id] = (request, done + 1)
            self._told.append((id, Progress(0, done + 1, STEPS)))
            if request.partial_images and done + 1 == STEPS // 2:
                self._told.append((id, Partial(0, 0, fakes.picture(request, 0))))
            if done + 1 == STEPS:
                del self.drawing[id]
                self._told.append((id, self._end(request)))

    def _end(self, request: ImageRequest) -> Finished | Failed:
        if request.seed in self.failing:
            return Failed(0, "the logits are not finite")
        self.finished += 1
        return fakes.finished(request, 0)


@dataclass
class Yard:
    """Makes replicas. `refuse`, `lose`: reasons why it does not. `gate`: spawning waits for it.
    `made` are all there ever were; `make` builds one."""

    make: Callable[[str], FakeReplica] = FakeReplica
    refuse: str | None = None
    lose: str | None = None
    made: list[FakeReplica] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    def __call__(self, name: str, wanted: Callable[[], bool]) -> FakeReplica | None:
        while not self.gate.wait(0.005):
            if not wanted():
                return None
        if self.refuse is not None:
            raise ReplicaRefused(self.refuse)
        if self.lose is not None:
            raise ReplicaLost(self.lose)
        self.made.append(replica := self.make(name))
        return replica

    def living(self) -> list[FakeReplica]:
        return [each for each in self.made if not (each.closed or each.dead)]
