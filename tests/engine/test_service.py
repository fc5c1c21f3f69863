"""The service: one thread draws, many callers listen."""

import asyncio
import gc
from collections.abc import Iterator

import pytest

from engine.config import EngineConfig
from engine.events import Failed, Finished, Partial, Progress
from engine.intake import KEPT_GROUPS
from engine.service import EngineService
from scheduler.request import PolicyChoice, RequestError
from tests.engine.conftest import ask


@pytest.fixture
def service() -> Iterator[EngineService]:
    service = EngineService(EngineConfig(model="tiny", cache_bytes=64 << 20))
    service.start()
    yield service
    service.stop()


async def collect(service: EngineService, request: object) -> list[object]:
    return [event async for event in service.stream(request)]  # type: ignore[arg-type]


def test_events_come_in_order(service: EngineService) -> None:
    events = asyncio.run(collect(service, ask(partial_images=2)))
    kinds = [type(e) for e in events]
    assert kinds.count(Progress) == 8
    assert [e.number for e in events if isinstance(e, Partial)] == [0, 1]
    assert kinds[-1] is Finished
    assert events[-1].pixels.shape == (32, 32, 3)


def test_many_callers_at_once_get_their_own_pictures(service: EngineService) -> None:
    alone = [asyncio.run(collect(service, ask(seed=s)))[-1].tokens for s in range(10)]

    async def all_at_once() -> list[list[object]]:
        return await asyncio.gather(*(collect(service, ask(seed=s)) for s in range(10)))

    together = [events[-1].tokens for events in asyncio.run(all_at_once())]
    assert together == alone


def test_closing_the_stream_aborts(service: EngineService) -> None:
    async def leave_early() -> None:
        stream = service.stream(ask(n=4))
        async for _ in stream:
            break
        await stream.aclose()

    asyncio.run(leave_early())
    assert asyncio.run(collect(service, ask()))[-1].index == 0
    assert service.stats().images_aborted == 4
    assert service.stats().cache_bytes_used == 0


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        ({"policy": PolicyChoice("dense", 0.5)}, "policy"),
        ({"policy": PolicyChoice("diagnal", 0.5)}, "policy"),
        ({"policy": PolicyChoice("diagonal", 0.5, (("resent", 3),))}, "policy"),
        ({"policy": PolicyChoice("diagonal", 0.99, (("sink", 4),))}, "policy"),
        ({"policy": PolicyChoice("diagonal", 0.5, (("recent", 20.5),))}, "policy"),
        ({"policy": PolicyChoice("diagonal", 0.5, (("sink", "4"),))}, "policy"),
        ({"policy": PolicyChoice("diagonal", 0.5, (("sink", True),))}, "policy"),
        ({"policy": PolicyChoice("h2o", 0.5)}, "policy"),
        ({"policy": PolicyChoice("tova", 0.5)}, "policy"),
        ({"size": (512, 512)}, "size"),
        ({"prompt": " ".join(["word1"] * 40)}, "prompt"),
        ({"negative_prompt": " ".join(["word1"] * 40)}, "negative_prompt"),
    ],
)
def test_what_the_model_cannot_do_is_refused_at_once(
    service: EngineService, bad: dict[str, object], param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        asyncio.run(collect(service, ask(**bad)))
    assert caught.value.param == param
    assert asyncio.run(collect(service, ask()))


def test_a_stream_that_nobody_reads_can_be_closed(service: EngineService) -> None:
    async def leave_at_once() -> None:
        stream = service.stream(ask(n=2))
        await stream.aclose()
        await stream.aclose()
        assert [event async for event in stream] == []

    asyncio.run(leave_at_once())
    assert asyncio.run(collect(service, ask()))
    assert service.stats().images_aborted == 2


def test_a_loop_that_closes_with_open_streams_leaves_the_engine_alive(
    service: EngineService,
) -> None:
    streams = []

    async def forget() -> None:
        streams.append(service.stream(ask(n=2)))

    asyncio.run(forget())
    assert asyncio.run(collect(service, ask()))[-1].index == 0
    assert service.health().alive
    assert service.stats().images_aborted == 2


def test_run_serves_a_plain_thread(service: EngineService) -> None:
    events = list(service.run([ask(seed=1), ask(seed=2, n=2)]))
    done = sorted((i, e.index) for i, e in events if isinstance(e, Finished))
    assert done == [(0, 0), (1, 0), (1, 1)]


def test_bad_logits_fail_one_image_alone(service: EngineService) -> None:
    model = service._engine.model
    draw = model.logits
    model.logits = lambda h: draw(h).index_fill_(0, h.new_tensor([0]).long(), float("nan"))  # type: ignore[method-assign]
    events = list(service.run([ask(seed=1), ask(seed=2)]))
    model.logits = draw  # type: ignore[method-assign]
    assert any(isinstance(e, Failed) and "NaN" in e.reason for _, e in events)
    assert any(isinstance(e, Finished) for e in asyncio.run(collect(service, ask())))


def test_a_dead_engine_says_so(service: EngineService) -> None:
    assert service.health().alive

    def broken(*_: object) -> None:
        raise RuntimeError("boom")

    service._engine.runner.run = broken  # type: ignore[assignment, method-assign]
    [event] = asyncio.run(collect(service, ask()))
    assert isinstance(event, Failed)
    assert "boom" in event.reason
    assert not service.health().alive
    with pytest.raises(RuntimeError, match="boom"):
        asyncio.run(collect(service, ask()))


def test_stop_ends_what_runs_and_is_idempotent(service: EngineService) -> None:
    stream = service.run([ask(n=4)])
    next(stream)
    service.stop()
    assert all(isinstance(e, Failed | Progress) for _, e in stream)
    service.stop()
    assert not service.health().alive


def test_policies_that_nobody_uses_any_more_are_forgotten(service: EngineService) -> None:
    """A client may ask for any sparsity: what is kept for one must not stay for good."""
    for first in range(0, 200, 40):
        choices = [PolicyChoice("diagonal", 0.3 + k / 1000) for k in range(first, first + 40)]
        assert list(service.run([ask(policy=choice) for choice in choices]))
    gc.collect()
    engine = service._engine
    assert len(engine.runner._rows) <= KEPT_GROUPS
    assert len(engine.runner.arena._layers) <= KEPT_GROUPS
    assert len(engine.intake._groups) <= KEPT_GROUPS
