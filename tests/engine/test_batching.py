"""An image depends on its request alone, whoever shares its steps and however often it restarts."""

import pytest

from engine.engine import Engine
from scheduler.request import Priority, Sampling
from tests.engine.conftest import ask, diagonal, draw, tiny_engine


def others(count: int) -> list[object]:
    kinds = [{}, {"policy": diagonal()}, {"sampling": Sampling(1.0)}, {"n": 2}]
    return [ask(f"word{i}", seed=100 + i, **kinds[i % len(kinds)]) for i in range(count)]


@pytest.mark.parametrize("policy", [None, diagonal(), diagonal(0.5, sink=4, recent=40)])
def test_same_tokens_alone_and_among_others(backend: str, policy: object) -> None:
    options = {} if policy is None else {"policy": policy}
    [alone] = draw(tiny_engine(backend), ask(**options))
    for count in (1, 3, 7):
        together = draw(tiny_engine(backend), *others(count), ask(**options))
        assert together[-1] == alone, f"among {count} others"


def test_every_batch_size_gives_the_same_tokens(backend: str) -> None:
    [[alone]] = draw(tiny_engine(backend), ask(seed=5))
    for size in range(1, 17):
        requests = [ask(seed=5)] + [ask(seed=50 + i) for i in range(size - 1)]
        assert draw(tiny_engine(backend), *requests)[0] == [alone], f"in a batch of {size}"


def test_image_k_equals_a_request_with_seed_plus_k(engine: Engine) -> None:
    [four] = draw(engine, ask(seed=7, n=4))
    singles = draw(engine, *(ask(seed=7 + k) for k in range(4)))
    assert four == [tokens for [tokens] in singles]


def test_images_join_between_steps(engine: Engine) -> None:
    [[alone]] = draw(engine, ask(seed=3))
    first, second = [], []
    engine.add(ask(seed=9), first.append)
    for _ in range(11):
        engine.step()
    engine.add(ask(seed=3), second.append)
    while engine.step():
        pass
    assert second[-1].tokens == alone


def test_what_a_policy_learns_survives_others_joining(backend: str) -> None:
    """Images that start in the step in which another learns make room for what they will learn."""
    [[alone]] = draw(tiny_engine(backend), ask(seed=1, policy=diagonal()))
    engine, first = tiny_engine(backend), []
    engine.add(ask(seed=1, policy=diagonal()), first.append)
    for i in range(6):
        for _ in range(6):
            engine.step()
        engine.add(ask(seed=10 + i, policy=diagonal()), lambda event: None)
    while engine.step():
        pass
    assert first[-1].tokens == alone


def test_a_parked_image_restarts_to_the_same_picture(backend: str) -> None:
    [[alone]] = draw(tiny_engine(backend), ask(seed=2, policy=diagonal()))
    engine = tiny_engine(backend, max_images=1)
    batch, interactive = [], []
    engine.add(ask(seed=2, policy=diagonal(), priority=Priority.BATCH), batch.append)
    for _ in range(30):
        engine.step()
    engine.add(ask(seed=8), interactive.append)
    while engine.step():
        pass
    assert engine.scheduler.stats().totals.parked == 1
    assert batch[-1].tokens == alone


def test_abort_frees_everything_and_spares_the_others(engine: Engine) -> None:
    [[alone]] = draw(engine, ask(seed=4))
    gone, kept = [], []
    doomed = ask(seed=1, n=3, policy=diagonal())
    engine.add(doomed, gone.append)
    engine.add(ask(seed=4), kept.append)
    for _ in range(5):
        engine.step()
    engine.abort(doomed.id)
    while engine.step():
        pass
    assert kept[-1].tokens == alone
    assert not [e for e in gone if hasattr(e, "tokens")]
    assert engine.scheduler.stats().used_bytes == 0
    assert not engine.runner.images
