"""The router over replicas that fail in every way: nothing is lost, nothing is told twice."""

import asyncio
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from engine.events import Event, Failed, Finished, Partial, Progress
from engine.replicas import keeper
from engine.replicas.replica import ReplicaLost, ReplicaRefused
from engine.replicas.router import Router, RouterConfig
from engine.service_api import FleetError, ReadQuery, ReplicaState
from scheduler.request import ImageRequest, PolicyChoice, Priority, RequestError, Sampling
from tests.engine.replicas.steered import FakeReplica, FakeSpawn
from tests.fakes import picture, wait_until

SAMPLING = Sampling(4.0)
Start = Callable[..., Router]


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "FIRST_PAUSE", 0.01)


@pytest.fixture
def yard() -> FakeSpawn:
    return FakeSpawn()


@pytest.fixture
def start(yard: FakeSpawn) -> Iterator[Start]:
    """A started router over replicas of the yard, all of them ready."""
    started: list[Router] = []

    def start(replicas: int = 2, **config: float) -> Router:
        router = Router(yard, replicas, RouterConfig(beat_seconds=0.005, **config))  # type: ignore[arg-type]
        started.append(router)
        router.start()
        assert wait_until(lambda: router.health().engines == replicas)
        yard.made.sort(key=lambda each: each.name)  # they start in any order
        return router

    yield start
    yard.held = False
    for router in started:
        router.stop()


def ask(seed: int = 0, **wanted: object) -> ImageRequest:
    return ImageRequest("a cat", seed, SAMPLING, **wanted)  # type: ignore[arg-type]


class Heard:
    """What a listener heard of a request."""

    def __init__(self, router: Router, request: ImageRequest) -> None:
        self.request = request
        self.items: list[Event | Exception] = []
        router.submit(request, self.items.append)

    def of(self, kind: type) -> list[Event | Exception]:
        return [item for item in self.items if isinstance(item, kind)]

    @property
    def ended(self) -> bool:
        return len(self.of((Finished, Failed))) == self.request.n or bool(self.of(Exception))  # type: ignore[arg-type]

    def check(self) -> None:
        """Every picture is there once, is that of its seed, and nothing was told twice."""
        finished = self.of(Finished)
        assert sorted(each.index for each in finished) == list(range(self.request.n))  # type: ignore[union-attr]
        told: dict[int, list[int]] = defaultdict(list)
        for item in self.items:
            if isinstance(item, Finished):
                assert item.seed == self.request.seed + item.index
                assert np.array_equal(item.pixels, picture(self.request, item.index))
            if isinstance(item, Progress):
                told[item.index].append(item.done)
        assert all(dones == sorted(set(dones)) for dones in told.values())
        partials = [(p.index, p.number) for p in self.of(Partial)]  # type: ignore[union-attr]
        assert (
            len(partials)
            == len(set(partials))
            == self.request.n * bool(self.request.partial_images)
        )


def ended(*heard: Heard) -> bool:
    return wait_until(lambda: all(each.ended for each in heard), 10)


class TestDrawing:
    def test_images_of_a_request_are_spread(self, start: Start, yard: FakeSpawn) -> None:
        router = start(2)
        heard = Heard(router, ask(5, n=4, partial_images=1))
        assert ended(heard)
        heard.check()
        assert [len(each.given) for each in yard.made] == [2, 2]

    def test_from_asyncio_and_from_a_thread(self, start: Start) -> None:
        router = start(2)

        async def follow() -> list[Event]:
            return [event async for event in router.stream(ask(3, n=2))]

        events = asyncio.run(follow())
        assert {e.index for e in events if isinstance(e, Finished)} == {0, 1}
        drawn = [e for _, e in router.run([ask(1), ask(2)]) if isinstance(e, Finished)]
        assert sorted(each.seed for each in drawn) == [1, 2]

    def test_the_queue_counts_as_waiting(self, start: Start, yard: FakeSpawn) -> None:
        router = start(1)
        yard.made[0].frozen = True
        heard = Heard(router, ask(n=7))
        assert wait_until(lambda: router.stats().images_running == 4)
        assert router.stats().images_waiting == 3
        yard.made[0].frozen = False
        assert ended(heard)

    def test_interactive_pictures_overtake_lines(self, start: Start, yard: FakeSpawn) -> None:
        router = start(1)
        yard.made[0].frozen = True
        lines = [Heard(router, ask(k, priority=Priority.BATCH)) for k in range(8)]
        now = Heard(router, ask(100))
        assert wait_until(lambda: any(r.seed == 100 for r in yard.made[0].given))
        assert len(yard.made[0].given) == 5
        yard.made[0].frozen = False
        assert ended(now, *lines)
        assert yard.made[0].given[4].seed == 100

    def test_a_new_replica_gets_what_waits(self, start: Start, yard: FakeSpawn) -> None:
        router = start(1)
        yard.made[0].frozen = True
        heard = Heard(router, ask(n=8))
        router.scale(2)
        assert wait_until(lambda: len(heard.of(Finished)) == 4)
        yard.made[0].frozen = False
        assert ended(heard)
        heard.check()


class TestRefusals:
    def test_check_asks_a_replica(self, start: Start) -> None:
        router = start(1)
        with pytest.raises(RequestError, match="words"):
            router.check(ImageRequest("cat " * 50, 0, SAMPLING))

    def test_a_refusal_is_told_once(self, start: Start) -> None:
        router = start(2)
        heard = Heard(router, ImageRequest("refuse this", 0, SAMPLING))
        assert ended(heard)
        assert [type(item) for item in heard.items] == [RequestError]

    def test_a_picture_that_fails_fails_alone(self, start: Start, yard: FakeSpawn) -> None:
        router = start(2)
        for each in yard.made:
            each.failing = frozenset({6})
        heard = Heard(router, ask(5, n=3))
        assert ended(heard)
        assert [(e.index, e.reason) for e in heard.of(Failed)] == [(1, "NaN")]  # type: ignore[union-attr]
        assert len(heard.of(Finished)) == 2

    def test_a_replica_that_cannot_be_had_says_why(self) -> None:
        router = Router(FakeSpawn(fails=[ReplicaRefused("no such model")] * 9), 2)
        with pytest.raises(RuntimeError, match="no such model"):
            router.start()

    def test_numbers_and_names_that_make_no_sense(self, start: Start) -> None:
        with pytest.raises(ValueError, match="at least 1"):
            Router(FakeSpawn(), 0)
        router = start(2)
        with pytest.raises(FleetError, match=r"1\.\."):
            router.scale(0)
        with pytest.raises(FleetError, match="no replica 'x'"):
            router.restart("x")

    def test_a_start_that_fails_is_tried_again(self, yard: FakeSpawn) -> None:
        yard.fails = [ReplicaLost("the machine went away")] * 3
        router = Router(yard, 1, RouterConfig(beat_seconds=0.005))
        thread = threading.Thread(target=router.start)
        thread.start()
        assert wait_until(lambda: router.replicas() and router.replicas()[0].reason)
        thread.join(5)
        assert router.health().alive
        router.stop()


def die(replica: FakeReplica) -> None:
    replica.dead = True


def crash(replica: FakeReplica) -> None:
    replica.broken = "boom"


def hang(replica: FakeReplica) -> None:
    replica.stuck_seconds = 1000.0


@pytest.mark.parametrize("end", [die, crash, hang])
class TestLosses:
    @pytest.mark.parametrize("after", [0, 3, 6])
    def test_pictures_go_on_elsewhere(
        self, start: Start, yard: FakeSpawn, end: Callable[[FakeReplica], None], after: int
    ) -> None:
        router = start(2)
        first, second = yard.made
        first.step_seconds = second.step_seconds = 0.005
        heard = Heard(router, ask(1, n=8, partial_images=1))
        assert wait_until(lambda: first.steps >= after)
        end(first)
        assert ended(heard)
        heard.check()
        assert wait_until(lambda: router.health().engines == 2)
        lost = router.replicas()[0]
        assert lost.restarts == 1 and lost.reason
        assert first.closed

    def test_the_only_one_comes_back(
        self, start: Start, yard: FakeSpawn, end: Callable[[FakeReplica], None]
    ) -> None:
        router = start(1)
        yard.held = True
        heard = Heard(router, ask(1, n=2))
        end(yard.made[0])
        assert wait_until(lambda: not router.health().alive or heard.ended)
        if not heard.ended:
            assert "no replica is alive" in (router.health().error or "")
        yard.held = False
        assert ended(heard)
        heard.check()


class TestOperators:
    def test_drain_lets_pictures_end(self, start: Start, yard: FakeSpawn) -> None:
        router = start(2)
        for each in yard.made:
            each.frozen = True
        heard = Heard(router, ask(n=4))
        router.drain("replica-0")
        assert router.replicas()[0].state is ReplicaState.DRAINING
        more = Heard(router, ask(9, n=2))
        assert [len(each.given) for each in yard.made] == [2, 4]
        for each in yard.made:
            each.frozen = False
        assert ended(heard, more)
        heard.check()
        assert wait_until(lambda: [r.name for r in router.replicas()] == ["replica-1"])
        assert yard.made[0].closed and not yard.made[0].aborted
        with pytest.raises(FleetError, match="only replica"):
            router.drain("replica-1")

    def test_pictures_that_do_not_end_are_moved(self, start: Start, yard: FakeSpawn) -> None:
        router = start(2, drain_seconds=0.05)
        yard.made[0].frozen = True
        heard = Heard(router, ask(n=4))
        router.drain("replica-0")
        assert ended(heard)
        heard.check()

    def test_scaling_down_takes_the_youngest(self, start: Start, yard: FakeSpawn) -> None:
        router = start(3)
        router.scale(1)
        assert wait_until(lambda: [r.name for r in router.replicas()] == ["replica-0"])
        router.scale(2)
        assert wait_until(lambda: router.health().engines == 2)

    def test_scaling_down_takes_what_is_not_there_first(
        self, start: Start, yard: FakeSpawn
    ) -> None:
        router = start(2)
        yard.held = True
        die(yard.made[0])
        assert wait_until(lambda: router.health().engines == 1)
        router.scale(1)
        assert wait_until(lambda: [r.name for r in router.replicas()] == ["replica-1"])
        assert router.health().alive and not router.health().replacing

    def test_a_rolling_restart_replaces_all_and_loses_nothing(
        self, start: Start, yard: FakeSpawn
    ) -> None:
        router = start(3)
        heard = [Heard(router, ask(10 * k, n=4)) for k in range(6)]
        router.restart()
        assert wait_until(lambda: [r.restarts for r in router.replicas()] == [1, 1, 1], 10)
        assert ended(*heard)
        for each in heard:
            each.check()
        assert all(not each.aborted for each in yard.made)

    def test_one_rolling_restart_at_a_time(self, start: Start, yard: FakeSpawn) -> None:
        router = start(2)
        yard.held = True
        router.restart()
        with pytest.raises(FleetError, match="already"):
            router.restart()

    def test_counters_survive_replicas(self, start: Start, yard: FakeSpawn) -> None:
        router = start(2)
        assert ended(Heard(router, ask(n=6)))
        assert wait_until(lambda: router.stats().images_finished == 6)
        die(yard.made[0])
        assert wait_until(lambda: len(yard.made) == 3)
        assert router.stats().images_finished == 6
        router.scale(1)
        assert wait_until(lambda: len(router.replicas()) == 1)
        assert router.stats().images_finished == 6


class TestEnds:
    def test_abort_is_heard_of_no_more(self, start: Start, yard: FakeSpawn) -> None:
        router = start(2)
        for each in yard.made:
            each.frozen = True
        heard = Heard(router, ask(n=10))
        assert wait_until(lambda: router.stats().images_running == 8)
        router.abort(heard.request.id)
        told = len(heard.items)
        for each in yard.made:
            each.frozen = False
        assert wait_until(lambda: router.stats().images_running == 0)
        assert router.stats().images_waiting == 0
        assert len(heard.items) == told
        assert sum(len(each.aborted) for each in yard.made) == 8

    def test_stop_fails_what_is_left(self, start: Start, yard: FakeSpawn) -> None:
        router = start(1)
        yard.made[0].frozen = True
        heard = Heard(router, ask(n=6))
        router.stop()
        assert [e.reason for e in heard.of(Failed)] == ["the engine is stopping"] * 6  # type: ignore[union-attr]
        assert all(each.closed for each in yard.made)
        with pytest.raises(RuntimeError, match="stopping"):
            router.submit(ask(), print)

    def test_a_picture_that_kills_replicas_ends_alone(self, yard: FakeSpawn, start: Start) -> None:
        """Others that were there at first are drawn; it fails when it has cost enough."""

        yard.prepare = lambda replica: setattr(replica, "deadly", frozenset({666}))
        router = start(2, max_losses=4)
        others = [Heard(router, ask(k)) for k in range(4)]
        poison = Heard(router, ask(666))
        assert ended(poison, *others)
        for each in others:
            each.check()
        (failed,) = poison.of(Failed)
        assert "5 replicas were lost" in failed.reason  # type: ignore[union-attr]
        after = Heard(router, ask(7))
        assert ended(after)

    def test_reads_are_asked_of_a_replica(self, start: Start) -> None:
        router = start(2)
        query = ReadQuery(PolicyChoice(), 0, 0, 5)
        assert router.read_set(query).position == 5


def test_chaos(start: Start, yard: FakeSpawn) -> None:
    """Replicas die, hang and are scaled at random while requests come and some are aborted."""
    router, chance = start(3), random.Random(4)
    heard, aborted = [], []
    for k in range(60):
        heard.append(Heard(router, ask(20 * k, n=chance.randint(1, 4), partial_images=k % 2)))
        living = [each for each in yard.made if not (each.closed or each.dead)]
        if chance.random() < 0.3 and living:
            chance.choice([die, crash, hang])(chance.choice(living))
        if chance.random() < 0.1:
            router.scale(chance.randint(1, 4))
        if chance.random() < 0.1 and not heard[-1].ended:
            aborted.append(heard.pop())
            router.abort(aborted[-1].request.id)
        time.sleep(0.002)
    assert ended(*heard)
    for each in heard:
        if not each.of(Failed):
            each.check()
    assert all("replicas were lost" in e.reason for h in heard for e in h.of(Failed))  # type: ignore[union-attr]
    assert wait_until(lambda: router.stats().images_waiting == 0)


def test_health_while_one_is_replaced(start: Start, yard: FakeSpawn) -> None:
    router = start(2)
    yard.held = True
    die(yard.made[0])
    assert wait_until(lambda: router.health().engines == 1)
    assert router.health().alive and router.health().replacing
    yard.held = False
    assert wait_until(lambda: not router.health().replacing)
