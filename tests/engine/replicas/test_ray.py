"""Replicas in Ray actors that are really killed. Skipped where Ray is not installed."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.events import Failed, Finished
from engine.replicas.replica import ReplicaRefused
from engine.replicas.router import Router, RouterConfig
from engine.service import EngineService
from engine.service_api import ReadQuery
from scheduler.request import ImageRequest, PolicyChoice, Priority, RequestError
from tests.fakes import wait_until

pytest.importorskip("ray", reason="needs the extra `ray`")

from engine.replicas import ray_actor

# Ray's own: sockets it leaves to the collector, and what its next version will do.
pytestmark = [
    pytest.mark.filterwarnings("default::ResourceWarning"),
    pytest.mark.filterwarnings("default::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("default::DeprecationWarning"),
    pytest.mark.filterwarnings("default::FutureWarning"),
]

CONFIG = EngineConfig(model="tiny", threads=1, cache_bytes=64 << 20, max_images=8)


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    ray_actor.connect(None, cpus=2)
    yield
    ray_actor.disconnect()


@pytest.fixture
def router(ray_here: None) -> Iterator[Router]:
    spawn = ray_actor.RaySpawn(CONFIG, silent_seconds=5.0)
    router = Router(spawn, 2, RouterConfig(beat_seconds=0.2, max_losses=50))
    router.start()
    yield router
    router.stop()


@pytest.fixture(scope="module")
def alone() -> Iterator[EngineService]:
    service = EngineService(CONFIG)
    service.start()
    yield service
    service.stop()


def line(service: Router | EngineService, seed: int, **wanted: object) -> ImageRequest:
    prompt = f"picture {seed}"
    return ImageRequest(prompt, seed, service.model.sampling, **wanted)  # type: ignore[arg-type]


def same(found: Finished, expected: Finished) -> bool:
    return found.tokens == expected.tokens and np.array_equal(found.pixels, expected.pixels)


def drawn(service: Router | EngineService, requests: list[ImageRequest]) -> dict[int, Finished]:
    """Every picture by its seed; each must come exactly once."""
    found: dict[int, Finished] = {}
    for _, event in service.run(requests):
        assert not isinstance(event, Failed), event.reason
        if isinstance(event, Finished):
            assert event.seed not in found
            found[event.seed] = event
    return found


def test_killed_replicas_cost_nothing_but_time(router: Router, alone: EngineService) -> None:
    """kill -9 while lines and live requests are drawn: every picture once, and the same ones."""
    lines = [line(router, k, priority=Priority.BATCH, policy=PolicyChoice("diagonal", 0.5))
             for k in range(60)]  # fmt: skip
    live = [line(router, 1000 + 10 * k, n=2) for k in range(10)]
    chance, killed, done = random.Random(1), [], threading.Event()

    def kill() -> None:
        while len(killed) < 4 and not done.is_set():
            time.sleep(chance.uniform(0.1, 0.5))
            living = [r.pid for r in router.replicas() if r.pid is not None and r.pictures]
            if living:
                killed.append(pid := chance.choice(living))
                os.kill(pid, signal.SIGKILL)
                wait_until(lambda pid=pid: pid not in [r.pid for r in router.replicas()])

    killer = threading.Thread(target=kill)
    killer.start()
    found = drawn(router, lines + live)
    done.set()
    killer.join()
    expected = drawn(alone, lines + live)
    assert killed
    assert found.keys() == expected.keys()
    assert all(same(found[seed], expected[seed]) for seed in expected)
    assert sum(r.restarts for r in router.replicas()) >= len(killed) - 1
    assert wait_until(lambda: router.health().engines == 2, 60)


def test_refusals_and_reads_cross_over(router: Router) -> None:
    with pytest.raises(RequestError) as refused:
        router.check(line(router, 1, policy=PolicyChoice("nonsense", 0.5)))
    assert refused.value.param == "policy"
    read = router.read_set(ReadQuery(PolicyChoice("window", 0.5), 0, 0, 20))
    assert read.position == 20 and read.reads


def test_a_model_that_is_not_there_is_refused(ray_here: None) -> None:
    router = Router(ray_actor.RaySpawn(EngineConfig(model="no-such-model", threads=1)), 1)
    with pytest.raises(RuntimeError, match="no-such-model"):
        router.start()


def test_a_ray_that_is_not_there_is_refused() -> None:
    with pytest.raises(ReplicaRefused, match="cannot reach Ray"):
        ray_actor.connect("ray://")
