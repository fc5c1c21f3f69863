"""Policies explained: options, read sets as runs, and what a picture has taught them."""

from collections.abc import Iterator

import pytest
import torch

from engine.config import EngineConfig
from engine.events import Finished
from engine.policy_info import Runs
from engine.reads import catalog, read_set, runs
from engine.service import EngineService
from engine.service_api import ReadQuery
from scheduler.request import ImageRequest, PolicyChoice, RequestError, Sampling
from sparse_attn.geometry import Grid
from sparse_attn.policies import POLICIES, build
from sparse_attn.policy import Batch, Heads, ReadPolicy

GRID, HEADS = Grid(4, 5, 1), Heads(2, 3)
CPU = torch.device("cpu")
STATIC = ("dense", "window", "streaming", "stencil", "lines")


@pytest.fixture(scope="module")
def service() -> Iterator[EngineService]:
    running = EngineService(EngineConfig("tiny", backend="reference", threads=1))
    running.start()
    yield running
    running.stop()


def positions(found: Runs | None) -> list[int]:
    assert found is not None
    return [position for first, last in found for position in range(first, last + 1)]


def policy(name: str, sparsity: float = 0.4) -> ReadPolicy:
    return build(name, GRID, HEADS, 0.0 if name == "dense" else sparsity)


@pytest.mark.parametrize("name", [*STATIC, "diagonal"])
def test_reads_and_residents_are_the_policy_s_own(name: str) -> None:
    chosen = policy(name)
    state = chosen.new_state(1, CPU)
    for t in range(GRID.tokens - 1):
        at = torch.tensor([t], dtype=torch.int32)
        zero = torch.zeros(1, dtype=torch.int64)
        mask = chosen.reads(1, state, Batch(zero, at, at, zero))
        found = read_set(chosen, 1, 2, t)
        assert positions(found.reads) == mask[0, 2].nonzero()[:, 0].tolist()
        assert positions(found.resident) == chosen.resident(1, 2, t, state)
        assert set(positions(found.reads)) <= set(positions(found.resident))
        assert found.source == ("fresh" if name == "diagonal" else "fixed")


@pytest.mark.parametrize("name", ["h2o", "tova", "alisa"])
def test_what_depends_on_a_picture_is_not_made_up(name: str) -> None:
    found = read_set(policy(name), 0, 0, 7)
    assert (found.source, found.reads, found.resident) == ("fresh", None, None)


@pytest.mark.parametrize(
    ("layer", "head", "position", "word"),
    [(2, 0, 0, "layer"), (0, 3, 0, "head"), (0, 0, 23, "position"), (-1, 0, 0, "layer")],
)
def test_what_is_not_there_is_named(layer: int, head: int, position: int, word: str) -> None:
    with pytest.raises(ValueError, match=f"{word} must lie in 0.."):
        read_set(policy("window"), layer, head, position)


def test_runs() -> None:
    assert runs([]) == ()
    assert runs([3]) == ((3, 3),)
    assert runs([0, 1, 2, 5, 7, 8]) == ((0, 2), (5, 5), (7, 8))


def test_the_catalog_tells_options_and_what_cannot_run(service: EngineService) -> None:
    found = catalog(service._engine.model, "native")
    infos = {info.name: info for info in found.policies}
    assert set(infos) == set(POLICIES)
    assert (found.layers, found.kv_heads) == (2, 2)
    assert [grid.tokens for grid in found.grids.values()] == [64]
    sink = next(o for o in infos["streaming"].options if o.name == "sink")
    assert (sink.types, sink.default, sink.required) == (("int",), 4, False)
    assert "leading visual keys" in sink.text
    anchors = next(o for o in infos["window"].options if o.name == "anchors")
    assert anchors.types == ("int", "str")
    assert not infos["dense"].takes_sparsity
    assert infos["window"].takes_sparsity
    assert "reference" in (infos["h2o"].unavailable or "")
    assert infos["diagonal"].unavailable is None
    on_reference = {info.name: info for info in service.policies().policies}
    assert on_reference["h2o"].unavailable is None


def draw(service: EngineService, choice: PolicyChoice) -> str:
    request = ImageRequest("a red apple", 3, Sampling(2.0), policy=choice)
    assert any(isinstance(event, Finished) for _, event in service.run([request]))
    return request.id


def test_what_a_picture_taught_is_shown_for_it_alone(service: EngineService) -> None:
    choice = PolicyChoice("diagonal", 0.8)
    id = draw(service, choice)
    found = service.read_set(ReadQuery(choice, 0, 1, 62, picture=id))
    fresh = service.read_set(ReadQuery(choice, 0, 1, 62))
    assert (found.source, fresh.source) == ("learned", "fresh")
    assert len(positions(found.reads)) == len(positions(fresh.reads)) == 13
    assert positions(found.reads) != positions(fresh.reads)
    other = service.read_set(ReadQuery(PolicyChoice("diagonal", 0.7), 0, 1, 62, picture=id))
    assert other.source == "fresh"


def test_few_pictures_are_remembered(service: EngineService) -> None:
    choice = PolicyChoice("diagonal", 0.8)
    first = draw(service, choice)
    for _ in range(8):
        draw(service, choice)
    assert service.read_set(ReadQuery(choice, 0, 0, 5, picture=first)).source == "fresh"
    assert len(service._engine.learned) == 8


def test_policies_that_learn_nothing_leave_nothing(service: EngineService) -> None:
    before = list(service._engine.learned)
    draw(service, PolicyChoice("window", 0.8))
    assert list(service._engine.learned) == before


def test_refusals_name_their_field(service: EngineService) -> None:
    for query, param in [
        (ReadQuery(PolicyChoice("window", 0.5), 9, 0, 0), "layer"),
        (ReadQuery(PolicyChoice("window", 0.5), 0, 0, 64), "position"),
        (ReadQuery(PolicyChoice("window", 0.5, (("sink", 1),)), 0, 0, 0), "policy"),
        (ReadQuery(PolicyChoice("window", 0.5), 0, 0, 0, size=(7, 7)), "size"),
    ]:
        with pytest.raises(RequestError) as refused:
            service.read_set(query)
        assert refused.value.param == param
