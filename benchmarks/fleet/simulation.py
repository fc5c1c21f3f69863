"""The fleet as discrete events: clients, front ends with their routers, GPUs, the job store.

Each front end owns an equal part of the GPUs, as `bishop serve --replicas` does, and a balancer
spreads clients over the front ends in turn. Lines of batches are claimed from the database by
whoever has room.
"""

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import simpy

from benchmarks.fleet.inputs import Inputs
from benchmarks.fleet.stations import Gpu, Process, Station
from engine.replicas.choice import Load, choose


@dataclass(eq=False, slots=True)
class Image:
    """born: when its client asked, or its line was ready. tries: times it was begun."""

    batch: bool
    born: float
    tries: int = 0
    home: "FrontEnd | None" = None
    ended: simpy.Event | None = None


@dataclass(eq=False)
class Outcome:
    """What came out. latencies: of interactive images that were born after the warm-up.
    ended_warm: images that ended after it. ended_twice: always 0 unless the design is wrong."""

    latencies: list[float] = field(default_factory=list)
    begun: int = 0
    ended: int = 0
    ended_warm: int = 0
    ended_twice: int = 0
    redrawn: int = 0
    gpu_failures: int = 0
    front_end_failures: int = 0


class Routed:
    """A GPU as its router sees it."""

    def __init__(self, gpu: Gpu, room: int) -> None:
        self.gpu, self.room = gpu, room
        self.interactive = 0
        self.images: set[Image] = set()

    @property
    def load(self) -> Load:
        there = len(self.images)
        free = (self.room - there) << 20
        return Load(self.interactive, there - self.interactive, self.room, 0, free)


class FrontEnd:
    """One process: a CPU, a router, and the GPUs behind it."""

    def __init__(self, fleet: "Fleet", gpus: int) -> None:
        self.fleet, env = fleet, fleet.env
        self.cpu = Station(env, 1)
        self.up = True
        inputs = fleet.inputs
        made = [Gpu(env, inputs.step_seconds, inputs.tokens, self._drawn) for _ in range(gpus)]
        self.routed = [Routed(gpu, inputs.room) for gpu in made]
        self.by_gpu = {each.gpu: each for each in self.routed}
        self.queues: tuple[deque[Image], deque[Image]] = (deque(), deque())

    def submit(self, image: Image) -> None:
        image.home = self
        image.ended = self.fleet.env.event()
        self.queues[image.batch].append(image)
        self.dispatch()

    def dispatch(self) -> None:
        """As `engine.replicas.router` does."""
        for queue in self.queues:
            while queue:
                open_ones = [each for each in self.routed if each.gpu.up]
                chosen = choose(open_ones, not queue[0].batch)
                if chosen is None:
                    return
                self._send(chosen, queue.popleft())

    def _send(self, routed: Routed, image: Image) -> None:
        image.tries += 1
        routed.images.add(image)
        routed.interactive += not image.batch
        routed.gpu.add(image)

    def _drawn(self, gpu: Gpu, image: object) -> None:
        assert isinstance(image, Image)
        routed = self.by_gpu[gpu]
        routed.images.remove(image)
        routed.interactive -= not image.batch
        assert image.ended is not None
        image.ended.succeed(True)
        self.dispatch()

    def lose(self, routed: Routed) -> list[Image]:
        """A GPU is gone; what it drew."""
        routed.gpu.up = False
        left = [image for image in routed.gpu.clear() if isinstance(image, Image)]
        routed.images.clear()
        routed.interactive = 0
        return left

    def crash(self) -> list[Image]:
        """The process is gone, and all that it had."""
        self.up = False
        left = [image for routed in self.routed for image in self.lose(routed)]
        left += [image for queue in self.queues for image in queue]
        for queue in self.queues:
            queue.clear()
        return left


class Fleet:
    """Build it, `run` it, read `outcome` and the stations."""

    def __init__(self, inputs: Inputs, seed: int = 0, failures: bool = True) -> None:
        self.inputs, self.random = inputs, random.Random(seed)
        self.env = simpy.Environment()
        each, more = divmod(inputs.gpus, inputs.front_ends)
        self.front_ends = [FrontEnd(self, each + (k < more)) for k in range(inputs.front_ends)]
        self.database = Station(self.env, inputs.database_cores)
        self.storage = Station(self.env, 1)
        self.outcome = Outcome()
        self.warm = 0.0
        self._turn = 0
        self._failures = failures

    def run(self, warm: float, seconds: float, drain: float = 0.0) -> Outcome:
        """Clients come for `warm` + `seconds`; latencies are kept after `warm`. `drain`: seconds
        without new clients after that."""
        self.warm = warm
        rates = self.inputs.images_per_second, self.inputs.batch_share
        interactive, batch = rates[0] * (1 - rates[1]), rates[0] * rates[1]
        for rate, lines in ((interactive, False), (batch, True)):
            if rate:
                self.env.process(self._arrivals(rate, lines, warm + seconds))
        if self._failures:
            self._plan_failures()
        self.env.run(warm + seconds + drain)
        return self.outcome

    # -- clients -----------------------------------------------------------------------------

    def _arrivals(self, rate: float, batch: bool, until: float) -> Process:
        while True:
            yield self.env.timeout(self.random.expovariate(rate))
            if self.env.now >= until:
                return
            self.outcome.begun += 1
            self.env.process(self._image(Image(batch, self.env.now)))

    def _image(self, image: Image) -> Process:
        """An image until it has ended once, whatever fails meanwhile."""
        served = False
        while not served:
            home = self._next_front_end()
            if image.batch:
                claim = (self.inputs.line_transactions - 1) / self.inputs.lines_per_claim
                yield self._transactions(claim)
            yield from self._through(image, home)
            served = image.home is not None
            if not served:
                wait = self.inputs.lease_seconds if image.batch else self.inputs.retry_seconds
                yield self.env.timeout(wait)
        self._end(image)

    def _through(self, image: Image, home: FrontEnd) -> Process:
        """One front end's part; `image.home` is None if it crashed meanwhile."""
        inputs, cpu = self.inputs, home.cpu
        milliseconds = inputs.line_ms if image.batch else inputs.front_end_ms
        yield cpu.serve(milliseconds / 2000)
        if not home.up:
            image.home = None
            return
        home.submit(image)
        assert image.ended is not None
        if not (yield image.ended):
            image.home = None
            return
        yield cpu.serve(milliseconds / 2000)
        if image.batch:
            yield from self._store()
        if not home.up:
            image.home = None

    def _store(self) -> Process:
        """A line's record goes to storage, then the line is ended in the database."""
        yield self.storage.serve(1 / self.inputs.storage_puts)
        yield self.env.timeout(self.inputs.storage_seconds)
        yield self._transactions(1)

    def _transactions(self, count: float) -> simpy.Event:
        return self.database.serve(count * self.inputs.transaction_ms / 1000)

    def _next_front_end(self) -> FrontEnd:
        """In turn, past those that are down."""
        for _ in self.front_ends:
            self._turn = (self._turn + 1) % len(self.front_ends)
            if self.front_ends[self._turn].up:
                break
        return self.front_ends[self._turn]

    def _end(self, image: Image) -> None:
        outcome = self.outcome
        outcome.ended += 1
        outcome.ended_warm += self.env.now >= self.warm
        outcome.ended_twice += image.ended is None
        image.ended = None
        outcome.redrawn += image.tries > 1
        if image.born >= self.warm and not image.batch:
            outcome.latencies.append(self.env.now - image.born)

    # -- failures ----------------------------------------------------------------------------

    def _plan_failures(self) -> None:
        for front_end in self.front_ends:
            self.env.process(self._crashes(front_end))
            for routed in front_end.routed:
                self.env.process(self._deaths(front_end, routed))

    def _times(self, hours: float) -> Iterator[simpy.Event]:
        while True:
            yield self.env.timeout(self.random.expovariate(1 / (hours * 3600)))

    def _deaths(self, front_end: FrontEnd, routed: Routed) -> Process:
        """A replica is lost: its pictures go on elsewhere, it comes back later."""
        for failure in self._times(self.inputs.gpu_hours):
            yield failure
            if not (routed.gpu.up and front_end.up):
                continue
            self.outcome.gpu_failures += 1
            for image in reversed(front_end.lose(routed)):
                front_end.queues[image.batch].appendleft(image)
            front_end.dispatch()
            yield self.env.timeout(self.inputs.restart_seconds)
            routed.gpu.up = front_end.up
            front_end.dispatch()

    def _crashes(self, front_end: FrontEnd) -> Process:
        """A front end is lost: clients try again elsewhere, lines wait for their lease."""
        for failure in self._times(self.inputs.front_end_hours):
            yield failure
            self.outcome.front_end_failures += 1
            for image in front_end.crash():
                assert image.ended is not None
                image.ended.succeed(False)
            yield self.env.timeout(self.inputs.restart_seconds)
            front_end.up = True
            for routed in front_end.routed:
                routed.gpu.up = True
