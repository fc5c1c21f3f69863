"""Engines on the preset `tiny`, on both backends."""

from collections.abc import Callable

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.events import Event, Failed, Finished
from scheduler.request import ImageRequest, PolicyChoice, Sampling
from sparse_attn import ops


@pytest.fixture(params=["reference", "native"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "native" and ops.why_not() is not None:
        pytest.fail(f"the native operators must be built for the tests: {ops.why_not()}")
    return str(request.param)


@pytest.fixture
def engine(backend: str) -> Engine:
    return tiny_engine(backend)


def tiny_engine(backend: str, **options: object) -> Engine:
    settings = {"cache_bytes": 64 << 20, "kv_format": "fp32"} | options
    return Engine(EngineConfig(model="tiny", backend=backend, **settings))  # type: ignore[arg-type]


def ask(prompt: str = "word1 word2", seed: int = 1, **options: object) -> ImageRequest:
    sampling = options.pop("sampling", Sampling(3.0, top_p=0.95))
    return ImageRequest(prompt, seed=seed, sampling=sampling, **options)  # type: ignore[arg-type]


def diagonal(sparsity: float = 0.75, **options: int) -> PolicyChoice:
    return PolicyChoice("diagonal", sparsity, tuple(options.items()))


def draw(engine: Engine, *requests: ImageRequest) -> list[list[tuple[int, ...]]]:
    """Tokens of every image of every request, drawn together."""
    events: list[list[Event]] = [[] for _ in requests]
    for request, inbox in zip(requests, events, strict=True):
        engine.add(request, inbox.append)
    while engine.step():
        pass
    return [finished(inbox) for inbox in events]


def finished(events: list[Event]) -> list[tuple[int, ...]]:
    failures = [e for e in events if isinstance(e, Failed)]
    assert not failures, failures
    done = {e.index: e.tokens for e in events if isinstance(e, Finished)}
    return [done[i] for i in sorted(done)]


Drawer = Callable[..., list[list[tuple[int, ...]]]]
