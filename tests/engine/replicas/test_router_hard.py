"""The router over replicas that fail at every token, join and leave under load: every picture comes
once, whole and right, and is heard of in order."""

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from engine.events import Event, Failed, Finished, Partial, Progress
from engine.replicas import keeper
from engine.replicas.picture import SUSPECT
from engine.replicas.replica import ReplicaLost, ReplicaRefused
from engine.replicas.router import Router, RouterConfig
from engine.service_api import Fleet, FleetError, ReadQuery, ReplicaState
from scheduler.request import ImageRequest, PolicyChoice, Priority, RequestError
from tests.engine.replicas.steered import TOKENS, FakeReplica, FakeSpawn
from tests.fakes import MODEL, picture, wait_until

QUICK = RouterConfig(beat_seconds=0.01, stuck_seconds=0.5, drain_seconds=20)

Open = Callable[..., tuple[Router, FakeSpawn]]


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens routers, and stops them at the end."""
    monkeypatch.setattr(keeper, "FIRST_PAUSE", 0.01)
    opened: list[Router] = []

    def open_fleet(
        replicas: int = 2, config: RouterConfig = QUICK, **options: object
    ) -> tuple[Router, FakeSpawn]:
        spawn = FakeSpawn(**options)  # type: ignore[arg-type]
        router = Router(spawn, replicas, config)
        opened.append(router)
        router.start()
        assert wait_until(lambda: router.health().engines == replicas)
        return router, spawn

    yield open_fleet
    for router in opened:
        router.stop()


def ask(seed: int = 0, prompt: str = "a cat", **options: object) -> ImageRequest:
    return ImageRequest(prompt, seed, MODEL.sampling, **options)  # type: ignore[arg-type]


def batch(seed: int = 0, prompt: str = "a cat") -> ImageRequest:
    return ask(seed, prompt, priority=Priority.BATCH)


class Client(threading.Thread):
    """Draws requests in a thread of its own and judges what it hears."""

    def __init__(self, router: Router, requests: list[ImageRequest]) -> None:
        super().__init__(daemon=True)
        self._router, self.requests = router, requests
        self.events: list[tuple[int, Event]] = []
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            for told in self._router.run(self.requests):
                self.events.append(told)
        except Exception as error:
            self.error = error

    def ended(self) -> "Client":
        self.join(20)
        assert not self.is_alive(), "pictures are missing"
        if self.error is not None:
            raise self.error
        return self

    def judge(self) -> None:
        """Every picture once and right, every partial picture once, progress only forwards."""
        self.ended()
        ends = Counter((i, e.index) for i, e in self.events if isinstance(e, Finished | Failed))
        wanted = {(i, k) for i, request in enumerate(self.requests) for k in range(request.n)}
        assert set(ends) == wanted and set(ends.values()) == {1}
        for i, event in self.events:
            if isinstance(event, Finished):
                request = self.requests[i]
                assert event.seed == request.seed + event.index
                assert np.array_equal(event.pixels, picture(request, event.index))
        partial = Counter((i, e.index, e.number) for i, e in self.events if isinstance(e, Partial))
        assert set(partial) == {
            (i, k, number) for i, k in wanted for number in range(self.requests[i].partial_images)
        }
        assert set(partial.values()) <= {1}
        for key in wanted:
            steps = [
                e.done for i, e in self.events if isinstance(e, Progress) and (i, e.index) == key
            ]
            assert steps == list(range(1, TOKENS + 1))


def names(spawn: FakeSpawn) -> list[str]:
    """Whom the pictures went to, in order of names."""
    return [replica.name for replica in spawn.made for _ in replica.given]


class TestRouting:
    def test_one_request_is_spread_and_comes_back_whole(self, fleet: Open) -> None:
        router, spawn = fleet(2)
        Client(router, [ask(7, n=4, partial_images=3), ask(50)]).judge()
        assert Counter(names(spawn)).keys() == {"replica-0", "replica-1"}
        assert isinstance(router, Fleet)

    def test_interactive_pictures_go_where_the_fewest_of_their_kind_are(self, fleet: Open) -> None:
        router, spawn = fleet(3, prepare=lambda replica: setattr(replica, "frozen", True))
        client = Client(router, [ask(k) for k in range(9)])
        assert wait_until(lambda: len(names(spawn)) == 9)
        assert set(Counter(names(spawn)).values()) == {3}
        for replica in spawn.made:
            replica.frozen = False
        client.judge()

    def test_batch_pictures_fill_free_room_and_wait_here_for_the_rest(self, fleet: Open) -> None:
        router, spawn = fleet(2, room=3, prepare=lambda replica: setattr(replica, "frozen", True))
        client = Client(router, [batch(k) for k in range(20)])
        assert wait_until(lambda: len(names(spawn)) == 6)
        time.sleep(0.05)
        assert Counter(names(spawn)) == {"replica-0": 3, "replica-1": 3}
        assert router.stats().images_waiting == 14
        for replica in spawn.made:
            replica.frozen = False
        client.judge()

    def test_an_interactive_picture_overtakes_batch_pictures(self, fleet: Open) -> None:
        router, spawn = fleet(1, room=2, prepare=lambda replica: setattr(replica, "frozen", True))
        lines = Client(router, [batch(k) for k in range(6)])
        assert wait_until(lambda: len(names(spawn)) == 2)
        live = Client(router, [ask(k) for k in range(3)])
        assert wait_until(lambda: len(names(spawn)) == 4), "it goes on top of batch pictures"
        spawn.made[0].frozen = False
        live.judge()
        lines.judge()
        kinds = [request.priority for request in spawn.made[0].given]
        assert kinds[2:5] == [Priority.INTERACTIVE] * 3

    def test_no_batch_picture_where_the_cache_is_full(self, fleet: Open) -> None:
        def hold(replica: FakeReplica) -> None:
            replica.frozen, replica.cache_images = True, 1 if replica.name == "replica-0" else 8

        router, spawn = fleet(2, room=8, prepare=hold)
        client = Client(router, [batch(k) for k in range(4)])
        assert wait_until(lambda: len(names(spawn)) == 4)
        time.sleep(0.05)
        more = Client(router, [batch(k) for k in range(4, 8)])
        assert wait_until(lambda: len(names(spawn)) == 8)
        later = [r.name for r in spawn.made for q in r.given if q.seed >= 4]
        assert Counter(later)["replica-0"] <= 1
        for replica in spawn.made:
            replica.frozen = False
        client.judge()
        more.judge()

    def test_a_refusal_reaches_its_client_alone(self, fleet: Open) -> None:
        router, _ = fleet(2)
        with pytest.raises(RequestError):
            router.check(ask(prompt="word " * 40))
        good = Client(router, [ask(1)])
        bad = Client(router, [ask(1, "refuse this")])
        good.judge()
        with pytest.raises(RequestError):
            bad.ended()
        failed = Client(router, [ask(1, "fail this")]).ended()
        assert isinstance(failed.events[-1][1], Failed)

    def test_reads_are_asked_of_who_drew_the_picture(self, fleet: Open) -> None:
        router, spawn = fleet(2)
        for replica in spawn.made[:1]:
            replica.room = 0
        requests = [ask(k) for k in range(6)]
        Client(router, requests).judge()
        for request in requests:
            owner = next(r.name for r in spawn.made if request.id in [q.id for q in r.given])
            found = router.read_set(ReadQuery(PolicyChoice(), 0, 0, 3, picture=request.id))
            assert f"replica-{found.head}" == owner

    def test_time_in_the_router_is_time_in_the_queue(self, fleet: Open) -> None:
        router, spawn = fleet(1, room=1, prepare=lambda replica: setattr(replica, "frozen", True))
        client = Client(router, [ask(1), ask(2)])
        time.sleep(0.7)
        spawn.made[0].frozen = False
        client.judge()
        ends = [event for _, event in client.events if isinstance(event, Finished)]
        assert all(event.stats.queue_seconds > 0.15 for event in ends)  # the fake says .5 s drawing


def die(replica: FakeReplica) -> None:
    replica.dead = True


def hang(replica: FakeReplica) -> None:
    replica.stuck_seconds = 99.0


def cut_off(replica: FakeReplica) -> None:
    replica.silent = True


def break_down(replica: FakeReplica) -> None:
    replica.broken = "the engine died: boom"


FAILURES = (die, hang, cut_off, break_down)


class TestLoss:
    @pytest.mark.parametrize("lose", FAILURES)
    @pytest.mark.parametrize("done", [0, 5, TOKENS - 1])
    def test_its_pictures_are_drawn_elsewhere_and_heard_once(
        self, fleet: Open, lose: Callable[[FakeReplica], None], done: int
    ) -> None:
        router, spawn = fleet(2, step_seconds=0.004)
        client = Client(router, [ask(3, n=4, partial_images=3), *(batch(k) for k in range(6))])
        assert wait_until(lambda: sum(isinstance(e, Progress) for _, e in client.events) >= done)
        lost = spawn.now("replica-0")
        lose(lost)
        client.judge()
        assert wait_until(lambda: router.health().engines == 2)
        assert lost.closed
        seen = next(status for status in router.replicas() if status.restarts)
        assert seen.name == "replica-0" and seen.reason

    def test_all_lost_at_once(self, fleet: Open) -> None:
        router, spawn = fleet(2, step_seconds=0.003)
        client = Client(router, [ask(k, partial_images=1) for k in range(6)])
        assert wait_until(lambda: len(client.events) > 10)
        spawn.held = True
        for replica in spawn.made:
            replica.dead = True
        assert wait_until(lambda: not router.health().alive)
        health = router.health()
        assert health.replacing and "no replica is alive" in str(health.error)
        assert client.is_alive()
        with pytest.raises(ReplicaLost):
            router.read_set(ReadQuery(PolicyChoice(), 0, 0, 3))
        router.check(ask(prompt="word " * 40))  # nobody knows; the refusal comes later
        spawn.held = False
        client.judge()

    def test_degraded_while_one_is_replaced(self, fleet: Open) -> None:
        router, spawn = fleet(2)
        assert not router.health().replacing
        spawn.held = True
        spawn.made[0].dead = True
        assert wait_until(lambda: router.health().replacing)
        assert router.health().alive and router.health().engines == 1
        Client(router, [ask(1, n=3)]).judge()
        spawn.held = False
        assert wait_until(lambda: not router.health().replacing)

    def test_starts_that_fail_are_tried_again(self, fleet: Open) -> None:
        router, spawn = fleet(2)
        spawn.fails = [ReplicaLost("no machine"), ReplicaRefused("no weights there")]
        spawn.made[1].dead = True
        Client(router, [ask(k) for k in range(8)]).judge()
        assert wait_until(lambda: router.health().engines == 2)
        assert len(spawn.made) == 3

    def test_what_it_says_of_others_pictures_is_not_believed(self, fleet: Open) -> None:
        router, spawn = fleet(2, step_seconds=0.002)
        client = Client(router, [ask(1), ask(2)])
        assert wait_until(lambda: len(client.events) > 4)
        drawn = {id: replica for replica in spawn.made for id in replica.drawing}
        for id, owner in drawn.items():
            other = next(each for each in spawn.made if each is not owner)
            other.lies.append((id, Failed(0, "a lie")))
        client.judge()
        assert not any(isinstance(event, Failed) for _, event in client.events)

    def test_a_picture_that_kills_takes_no_other_down(self, fleet: Open) -> None:
        def allergic(replica: FakeReplica) -> None:
            take = replica.submit

            def submit(request: ImageRequest) -> None:
                take(request)
                if "poison" in request.prompt:
                    replica.dead = True

            replica.submit = submit  # type: ignore[method-assign]

        router, spawn = fleet(2, step_seconds=0.001, prepare=allergic)
        poison = Client(router, [ask(0, "poison")])
        good = Client(router, [*(batch(k) for k in range(12)), *(ask(k) for k in range(12))])
        good.judge()
        assert all(isinstance(event, Finished | Progress) for _, event in good.events)
        last = poison.ended().events[-1][1]
        assert isinstance(last, Failed) and "replicas were lost" in last.reason
        deaths = [r for r in spawn.made if any("poison" in q.prompt for q in r.given)]
        assert len(deaths) == QUICK.max_losses + 1
        alone = [r for r in deaths[SUSPECT:] if len(r.given) == 1 or r.drawing == [r.given[-1].id]]
        assert alone == deaths[SUSPECT:]
        Client(router, [ask(5)]).judge()

    @pytest.mark.parametrize("seed", range(6))
    def test_whatever_happens(self, fleet: Open, seed: int) -> None:
        """Random deaths, changes and aborts while interactive and batch pictures are drawn."""
        dice = random.Random(seed)
        router, spawn = fleet(3, step_seconds=0.001, room=3)
        lines = Client(router, [batch(k) for k in range(60)])
        live = [Client(router, [ask(100 * c + k, n=2, partial_images=2) for k in range(4)])
                for c in range(3)]  # fmt: skip
        spoilers: list[Callable[[], None]] = [
            *(lambda how=how: how(dice.choice(spawn.made)) for how in FAILURES),
            lambda: router.scale(dice.randint(1, 4)),
            lambda: router.restart(dice.choice(router.replicas()).name),
            lambda: router.drain(dice.choice(router.replicas()).name),
            lambda: router.restart(),
            lambda: _leave_early(router, dice.randint(0, 3)),
        ]
        for _ in range(14):
            time.sleep(dice.random() * 0.03)
            try:
                dice.choice(spoilers)()
            except FleetError:
                continue
        for client in (lines, *live):
            client.judge()
        assert wait_until(lambda: not any(status.pictures for status in router.replicas()))
        assert router.stats().images_waiting == 0


def _leave_early(router: Router, events: int) -> None:
    async def leave() -> None:
        stream = router.stream(ask(999, n=3))
        for _ in range(events):
            await anext(stream)
        await stream.aclose()

    asyncio.run(leave())


class TestAbort:
    def test_what_waits_and_what_is_drawn_is_dropped(self, fleet: Open) -> None:
        router, spawn = fleet(1, room=2, prepare=lambda replica: setattr(replica, "frozen", True))

        async def leave() -> None:
            stream = router.stream(ask(1, n=5))
            assert await asyncio.to_thread(wait_until, lambda: len(names(spawn)) == 2)
            await stream.aclose()
            assert [event async for event in stream] == []

        asyncio.run(leave())
        assert len(spawn.made[0].aborted) == 2
        assert router.stats().images_waiting == 0
        assert [status.pictures for status in router.replicas()] == [0]
        spawn.made[0].frozen = False
        Client(router, [ask(2)]).judge()

    def test_a_client_whose_loop_is_gone(self, fleet: Open) -> None:
        router, _ = fleet(1, step_seconds=0.002)

        async def forget() -> object:
            return router.stream(ask(1, n=3))

        stream = asyncio.run(forget())
        assert stream is not None
        assert wait_until(lambda: not router.replicas()[0].pictures)
        Client(router, [ask(2)]).judge()
        assert router.replicas()[0].restarts == 0


class TestChange:
    def test_scaling_up_brings_work_to_the_new_one_at_once(self, fleet: Open) -> None:
        router, spawn = fleet(1, room=2, step_seconds=0.003)
        client = Client(router, [batch(k) for k in range(24)])
        router.scale(3)
        client.judge()
        assert Counter(names(spawn)).keys() == {"replica-0", "replica-1", "replica-2"}

    def test_scaling_down_drops_nothing_and_draws_nothing_twice(self, fleet: Open) -> None:
        router, spawn = fleet(3, step_seconds=0.002)
        client = Client(router, [ask(k, partial_images=1) for k in range(20)])
        assert wait_until(lambda: len(client.events) > 10)
        router.scale(1)
        client.judge()
        assert wait_until(lambda: len(router.replicas()) == 1)
        assert len(names(spawn)) == 20
        assert router.replicas()[0].name == "replica-0"
        assert sum(each.closed for each in spawn.made) == 2
        assert router.stats().images_finished == 20, "what left is still counted"

    def test_scaling_down_takes_those_that_draw_nothing_first(self, fleet: Open) -> None:
        router, spawn = fleet(2)
        spawn.held = True
        spawn.now("replica-0").dead = True
        assert wait_until(lambda: router.health().engines == 1)
        router.scale(1)
        assert wait_until(lambda: [s.name for s in router.replicas()] == ["replica-1"])
        assert router.health().alive

    def test_a_start_that_is_no_longer_wanted_is_given_up(self, fleet: Open) -> None:
        router, spawn = fleet(1)
        spawn.held = True
        router.scale(3)
        assert router.health().replacing
        router.scale(1)
        assert wait_until(lambda: len(router.replicas()) == 1)
        assert not router.health().replacing

    def test_draining_and_restarting_one(self, fleet: Open) -> None:
        router, spawn = fleet(2, step_seconds=0.003)
        client = Client(router, [ask(k) for k in range(6)])
        assert wait_until(lambda: len(client.events) > 4)
        router.restart("replica-0")
        client.judge()
        assert wait_until(lambda: router.replicas()[0].restarts == 1)
        assert len(names(spawn)) == 6, "nothing was drawn twice"
        router.drain("replica-1")
        assert wait_until(lambda: len(router.replicas()) == 1)
        with pytest.raises(FleetError, match="only replica that draws"):
            router.drain("replica-0")
        with pytest.raises(FleetError, match=r"no replica 'replica-9' \(there are: replica-0\)"):
            router.drain("replica-9")
        with pytest.raises(FleetError, match="1..1024"):
            router.scale(0)

    def test_one_that_does_not_come_to_an_end_hands_its_pictures_over(self, fleet: Open) -> None:
        router, spawn = fleet(2, RouterConfig(beat_seconds=0.01, drain_seconds=0.05))
        spawn.now("replica-0").frozen = True
        client = Client(router, [ask(k) for k in range(4)])
        assert wait_until(lambda: len(spawn.now("replica-0").given) > 0)
        router.restart("replica-0")
        client.judge()

    def test_a_rolling_restart_replaces_all_while_it_serves(self, fleet: Open) -> None:
        router, spawn = fleet(3, step_seconds=0.001)
        seen: list[int] = []
        client = Client(router, [batch(k) for k in range(60)])
        router.restart()
        with pytest.raises(FleetError, match="already"):
            router.restart()
        while any(status.restarts == 0 for status in router.replicas()):
            seen.append(router.health().engines)
            time.sleep(0.001)
        assert min(seen) >= 2
        client.judge()
        assert len(names(spawn)) == 60 and len(spawn.made) == 6


class TestStartAndStop:
    def test_nobody_to_be_had(self) -> None:
        spawn = FakeSpawn(fails=[ReplicaRefused("the cache is too small")] * 9)
        router = Router(spawn, 2, QUICK)
        with pytest.raises(RuntimeError, match="the cache is too small"):
            router.start()

    def test_stopping_tells_everybody(self, fleet: Open) -> None:
        router, spawn = fleet(1, room=1, prepare=lambda replica: setattr(replica, "frozen", True))
        client = Client(router, [ask(1), batch(2)])
        assert wait_until(lambda: len(names(spawn)) == 1)
        router.stop()
        router.stop()
        client.ended()
        assert {type(event) for _, event in client.events} == {Failed}
        assert not router.health().alive and not router.health().replacing
        with pytest.raises(RuntimeError, match="stopping"):
            router.submit(ask(1), print)
        assert all(replica.closed for replica in spawn.made)

    def test_numbers_of_replicas(self) -> None:
        with pytest.raises(ValueError, match="at least 1"):
            Router(FakeSpawn(), 0)

    def test_states_are_told(self, fleet: Open) -> None:
        router, spawn = fleet(2)
        status = router.replicas()[0]
        assert (status.name, status.state) == ("replica-0", ReplicaState.READY)
        assert status.pid is not None and status.where == "here"
        spawn.held = True
        spawn.made[0].dead = True
        assert wait_until(lambda: router.replicas()[0].state is ReplicaState.STARTING)
        assert router.replicas()[0].reason == "killed" and router.replicas()[0].pid is None
