"""What pictures pass through: stations that serve in order, and GPUs that share their steps."""

import heapq
import itertools
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import simpy

Process = Generator[simpy.Event, Any, None]


@dataclass(eq=False)
class Station:
    """`servers` that serve in order of arrival. `busy`: seconds of service given out."""

    env: simpy.Environment
    servers: int
    busy: float = 0.0
    _free: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._free = [0.0] * self.servers

    def serve(self, seconds: float) -> simpy.Event:
        """An event at the end of `seconds` of service."""
        start = max(self.env.now, heapq.heappop(self._free))
        heapq.heappush(self._free, start + seconds)
        self.busy += seconds
        return self.env.timeout(start + seconds - self.env.now)

    def utilisation(self, seconds: float) -> float:
        return self.busy / (seconds * self.servers)


@dataclass(eq=False)
class Gpu:
    """Draws its pictures in common steps: a step takes longer the more there are, and a picture is
    done after a fixed number of steps. Nothing is simulated step by step: pictures leave in the
    order in which they came, so only arrivals and departures change the pace."""

    env: simpy.Environment
    step: Callable[[int], float]
    steps: int
    done: Callable[["Gpu", object], None]
    up: bool = True
    busy: float = 0.0
    _passed: float = 0.0
    _since: float = 0.0
    _change: int = 0
    _leaving: list[tuple[float, int, object]] = field(default_factory=list)
    _count: Any = field(default_factory=itertools.count)

    @property
    def images(self) -> int:
        return len(self._leaving)

    def add(self, image: object) -> None:
        self._advance()
        heapq.heappush(self._leaving, (self._passed + self.steps, next(self._count), image))
        self._plan()

    def drop(self, image: object) -> None:
        """Forget a picture that nobody waits for."""
        self._advance()
        self._leaving = [each for each in self._leaving if each[2] is not image]
        heapq.heapify(self._leaving)
        self._plan()

    def clear(self) -> list[object]:
        """Forget everything; what was there."""
        self._advance()
        left = [image for _, _, image in sorted(self._leaving, key=lambda each: each[:2])]
        self._leaving = []
        self._plan()
        return left

    def _advance(self) -> None:
        passed = self.env.now - self._since
        if self._leaving:
            self._passed += passed / self.step(self.images)
            self.busy += passed
        self._since = self.env.now

    def _plan(self) -> None:
        """When the next picture leaves, unless something changes before."""
        self._change += 1
        if self._leaving:
            steps = max(self._leaving[0][0] - self._passed, 0.0)
            event = self.env.timeout(steps * self.step(self.images), self._change)
            event.callbacks.append(self._leave)  # type: ignore[union-attr]

    def _leave(self, event: simpy.Event) -> None:
        if event.value != self._change:
            return
        self._advance()
        _, _, image = heapq.heappop(self._leaving)
        self._plan()
        self.done(self, image)
