"""A tensor-parallel engine with ranks that are processes: the same pictures, and an end that is
told rather than waited for."""

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.events import Failed, Finished
from engine.service import EngineService
from scheduler.request import ImageRequest, PolicyChoice, Sampling
from tests.fakes import wait_until

CONFIG = EngineConfig(model="tiny", threads=1, cache_bytes=64 << 20, tensor_parallel_size=2)
ALONE = EngineConfig(model="tiny", threads=1, cache_bytes=64 << 20)


@pytest.fixture
def pair() -> Iterator[EngineService]:
    service = EngineService(CONFIG)
    service.start()
    yield service
    service.stop()


def drawn(service: EngineService, requests: list[ImageRequest]) -> dict[int, Finished]:
    return {e.seed: e for _, e in service.run(requests) if isinstance(e, Finished)}


def test_two_processes_draw_as_one_until_one_dies(pair: EngineService) -> None:
    """Sampled and greedy, joining and leaving, one aborted; then rank 1 is killed."""
    sampling = pair.model.sampling
    requests = [
        ImageRequest(f"picture {k}", 10 * k, Sampling(3.0, 0.0) if k % 2 else sampling, n=1 + k % 3,
                     policy=PolicyChoice("diagonal", 0.5) if k % 3 else PolicyChoice())
        for k in range(8)
    ]  # fmt: skip
    left = pair.run([ImageRequest("nobody waits for this", 999, sampling)])
    next(left)
    left.close()  # type: ignore[attr-defined]
    found = drawn(pair, requests)
    alone = EngineService(ALONE)
    alone.start()
    expected = drawn(alone, requests)
    alone.stop()
    assert found.keys() == expected.keys()
    for seed, one in expected.items():
        assert found[seed].tokens == one.tokens
        assert np.array_equal(found[seed].pixels, one.pixels)
        assert found[seed].stats.kv_read_bytes == one.stats.kv_read_bytes

    ranks = pair._engine.ranks
    assert ranks is not None
    events = pair.run([ImageRequest("a cat", 1, sampling, n=4)])
    next(events)
    os.kill(ranks._processes[0].pid, signal.SIGKILL)
    failed = [event for _, event in events if isinstance(event, Failed)]
    assert len(failed) == 4
    assert wait_until(lambda: not pair.health().alive)
    assert "rank 1 of 2 has ended" in (pair.health().error or "")


def test_an_idle_rank_that_dies_shows_in_health(pair: EngineService) -> None:
    assert pair.health().alive
    ranks = pair._engine.ranks
    assert ranks is not None
    os.kill(ranks._processes[0].pid, signal.SIGKILL)
    assert wait_until(lambda: not pair.health().alive)
    assert "rank 1 of 2 has ended" in (pair.health().error or "")


def test_one_process_leads_one_group(pair: EngineService) -> None:
    with pytest.raises(RuntimeError, match="lead one tensor-parallel engine"):
        EngineService(CONFIG)
    assert drawn(pair, [ImageRequest("a cat", 1, pair.model.sampling)])


def test_a_size_that_does_not_fit_is_refused_and_leaves_nothing() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size 3 does not divide"):
        EngineService(EngineConfig(model="tiny", threads=1, tensor_parallel_size=3))
    with pytest.raises(ValueError, match="at least 1"):
        EngineConfig(tensor_parallel_size=0)
