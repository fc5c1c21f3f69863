"""Every family in two parts draws what it draws whole. The parts are threads of this process, which
sum as ranks do; `test_ranks` has real ones."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.engine import Engine
from engine.events import Finished
from engine.models.base import VisualModel
from engine.models.mini import Mini
from engine.models.options import LoadOptions
from engine.models.presets import load_model
from engine.parallel.shard import WHOLE, Shard, in_order
from scheduler.request import ImageRequest, PolicyChoice
from sparse_attn.policy import Heads
from tests.engine.families import harness
from tests.engine.families.zoo import ZOO
from tests.sparse_attn.policies.strategies import random_index

RANKS = 2
CHOICES = (
    PolicyChoice("dense"),
    PolicyChoice("diagonal", 0.5),
    PolicyChoice("stencil", 0.5),
    PolicyChoice("window", 0.6),
)


@dataclass(eq=False)
class Meeting:
    """Sums what the ranks bring."""

    brought: dict[int, Tensor] = field(default_factory=dict)
    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(RANKS, timeout=60))

    def sum(self, rank: int, x: Tensor) -> Tensor:
        self.brought[rank] = x
        self.barrier.wait()
        total = self.brought[0] + self.brought[1]
        self.barrier.wait()
        return total


@dataclass(frozen=True)
class Joined(Shard):
    meeting: Meeting | None = None

    def sum(self, x: Tensor) -> Tensor:
        assert self.meeting is not None
        return self.meeting.sum(self.rank, x)


Load = Callable[[Shard], VisualModel]


@pytest.fixture(params=[*sorted(ZOO), "tiny"])
def load(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Loads one part of a model, or all of it."""
    whole, name = harness.options, str(request.param)

    def load(shard: Shard) -> VisualModel:
        def options(*args: object, **values: object) -> LoadOptions:
            return replace(whole(*args, **values), shard=shard)  # type: ignore[arg-type]

        monkeypatch.setattr(harness, "options", options)
        if name not in ZOO:
            return load_model(name, options())
        torch.manual_seed(0)
        folder = tmp_path / f"{shard.rank}-of-{shard.size}"
        folder.mkdir()
        return ZOO[name](folder, harness.fast_backend())

    return load


@dataclass
class Drawn:
    """tokens: of every picture. logits: of every step that drew."""

    tokens: list[tuple[int, ...]]
    logits: list[Tensor]
    images: list[Finished]


def engine(model: VisualModel, shard: Shard) -> Engine:
    config = EngineConfig(
        model="test", backend=harness.fast_backend(), cache_bytes=64 << 20, kv_format="fp32",
        tensor_parallel_size=shard.size,
    )  # fmt: skip
    return Engine(config, model, shard)


def draw(model: VisualModel, shard: Shard, asked: list[ImageRequest]) -> Drawn:
    recorder = harness.Recorder(model)
    images = harness.draw(engine(model, shard), asked)
    return Drawn([each.tokens for each in images], recorder.seen, images)


def both(load: Load, asked: Callable[[VisualModel], list[ImageRequest]]) -> tuple[Drawn, Drawn]:
    """The same pictures by the whole model, and by two parts of it."""
    model, meeting = load(WHOLE), Meeting()
    shards = [Joined(rank, RANKS, meeting) for rank in range(RANKS)]
    parts = [load(shard) for shard in shards]
    requests = asked(model)
    with ThreadPoolExecutor(RANKS) as pool:
        runs = [pool.submit(draw, m, s, requests) for m, s in zip(parts, shards, strict=True)]
        leader, follower = (run.result() for run in runs)
    assert not follower.images
    for ours, theirs in zip(leader.logits, follower.logits, strict=True):
        assert ours.equal(theirs)  # or the ranks would draw apart
    return draw(model, WHOLE, requests), leader


def check(whole: Drawn, parts: Drawn) -> None:
    """Sums in another order: fp32's rounding, no more; and so the same tokens."""
    for one, two in zip(whole.logits, parts.logits, strict=True):
        assert (one - two).abs().max() <= 1e-4 * max(1.0, float(one.abs().max()))
    assert whole.tokens == parts.tokens
    for one, two in zip(whole.images, parts.images, strict=True):
        assert one.stats.kv_read_bytes == two.stats.kv_read_bytes
        assert one.stats.kv_resident_bytes == two.stats.kv_resident_bytes
        assert one.stats.density == two.stats.density


def test_two_parts_draw_what_the_whole_draws(load: Load) -> None:
    """Guided, greedy, prompts of different lengths, four policies in one batch."""

    def asked(model: VisualModel) -> list[ImageRequest]:
        return [
            harness.request(harness.PROMPTS[k % 3], policy=choice)
            for k, choice in enumerate(CHOICES)
        ]

    check(*both(load, asked))


def test_an_index_is_divided(load: Load, tmp_path: Path) -> None:
    def asked(model: VisualModel) -> list[ImageRequest]:
        shape, file = model.shape, tmp_path / "index.safetensors"
        index = random_index(model.grid, Heads(shape.layers, shape.kv_heads), shape.head_dim)
        replace(index, model=model.name).save(file)
        options = (("file", str(file)), ("resident", 0.6))
        return [harness.request(p, policy=PolicyChoice("indexed", 0.5, options))
                for p in harness.PROMPTS[:2]]  # fmt: skip

    whole, parts = both(load, asked)
    assert whole.tokens == parts.tokens


def test_int8_weights_are_divided() -> None:
    """`mini` in two parts: their outputs add up to the whole's, scales of rows and columns
    included."""
    whole = load_model("mini", harness.options())
    parts = [load_model("mini", harness.options(shard=Shard(rank, 2))) for rank in range(2)]
    assert isinstance(whole, Mini)
    x = torch.randn(5, whole.shape.dim)
    layer, pieces = whole._layers[3], [p._layers[3] for p in parts if isinstance(p, Mini)]
    qkv = torch.stack([piece.qkv(x).unflatten(1, (3, -1)) for piece in pieces], 2).flatten(2)
    assert qkv.flatten(1).allclose(layer.qkv(x), atol=1e-5)
    wide = torch.randn(5, whole.shape.q_heads * whole.shape.head_dim)
    summed = sum(
        piece.out(part.contiguous()) for piece, part in zip(pieces, wide.chunk(2, 1), strict=True)
    )
    assert torch.allclose(summed, layer.out(wide), atol=1e-4)  # type: ignore[arg-type]


def test_parts_are_summed_in_the_order_of_the_ranks() -> None:
    """Of more than two ranks, in an order that does not depend on where an element lies."""
    parts = [torch.randn(7, 5) * 10.0**k for k in range(4)]
    total = in_order(parts)
    assert total.equal(((parts[0] + parts[1]) + parts[2]) + parts[3])
    assert total[3:4].equal(in_order([part[3:4] for part in parts]))


def test_a_size_that_does_not_divide_is_refused(load: Load) -> None:
    with pytest.raises(ValueError, match="it can be 1"):
        load(Joined(0, 7, Meeting()))
