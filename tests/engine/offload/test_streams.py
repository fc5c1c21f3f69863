"""Weights and KV on disk: the same pictures, exactly the predicted bytes, and disks that fail."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.engine import Engine
from engine.events import Event, Failed, Finished
from engine.models import presets as loading
from engine.models.presets import load_model
from engine.offload import start
from engine.offload.config import OffloadConfig
from engine.offload.disk import OffloadError, ScratchFile
from engine.offload.layer_tensors import tensors_of
from engine.offload.placement import Placement, Share
from engine.offload.regions import StagedLayer, read_bytes, written_bytes
from engine.offload.weights import WeightStream
from scheduler.request import ImageRequest, PolicyChoice, Sampling
from sparse_attn.format import FORMATS
from sparse_attn.geometry import Grid
from sparse_attn.layout import CacheLayout
from sparse_attn.policies import build
from sparse_attn.policy import Heads, ReadPolicy
from tests.engine.conftest import ask, diagonal, draw, tiny_engine

POLICIES = [None, diagonal(), PolicyChoice("window", 0.7), PolicyChoice("stencil", 0.7)]


def offloaded(folder: Path, weights: float = 0, kv: float = 0, **options: object) -> Engine:
    """A `tiny` engine with so many percent of weights and of KV on disk."""
    placement = Placement(Share(0, 100 - weights, weights), Share(0, 100 - kv, kv))
    backend = options.pop("backend", "native")
    overlap = options.pop("overlap", True)
    placement = Placement(placement.weights, placement.cache, overlap=bool(overlap))
    staging = options.pop("staging_bytes", None)
    config = OffloadConfig(placement, folder, None, staging)  # type: ignore[arg-type]
    return tiny_engine(str(backend), offload=config, **({"cache_bytes": 2 << 20} | options))


def eight() -> list[ImageRequest]:
    requests = [ask(f"word{i}", seed=i, policy=p or PolicyChoice()) for i, p in enumerate(POLICIES)]
    return [*requests, ask(seed=9, n=2), ask(seed=5, sampling=Sampling(1.0)), ask(seed=6)]


@pytest.mark.parametrize(("weights", "kv"), [(50, 0), (100, 0), (0, 100), (60, 70)])
def test_pictures_are_those_of_memory(tmp_path: Path, weights: float, kv: float) -> None:
    engine = offloaded(tmp_path, weights, kv)
    assert draw(engine, *eight()) == draw(tiny_engine("native"), *eight())
    assert engine.offload.read_bytes > 0
    engine.close()
    assert not list(tmp_path.iterdir())


def test_the_reference_backend_agrees(tmp_path: Path) -> None:
    one = Sampling(1.0)
    requests = [
        ask(seed=2, sampling=one), ask(seed=3, policy=PolicyChoice("h2o", 0.6), sampling=one)
    ]  # fmt: skip
    plain = draw(tiny_engine("reference"), *requests)
    engine = offloaded(tmp_path, 100, 100, backend="reference")
    assert draw(engine, *requests) == plain
    engine.close()


@pytest.mark.parametrize("kv_format", ["bf16", "int8"])
def test_every_format_and_small_buffers(tmp_path: Path, kv_format: str) -> None:
    """With buffers for one sequence, every sequence is a load of its own."""
    plain = draw(tiny_engine("native", kv_format=kv_format), *eight())
    engine = offloaded(tmp_path, 0, 80, kv_format=kv_format, staging_bytes=64 << 10, overlap=False)
    assert draw(engine, *eight()) == plain
    engine.close()


def test_an_index_lives_on_disk_too(tmp_path: Path) -> None:
    """`indexed` on the bundled model, a few steps of it."""

    def tokens(offload: OffloadConfig) -> list[int]:
        engine = Engine(EngineConfig(cache_bytes=64 << 20, offload=offload))
        engine.add(ask("a cat", policy=PolicyChoice("indexed", 0.9)), lambda event: None)
        for _ in range(12):
            engine.step()
        drawn = list(next(iter(engine.runner.images.values())).tokens)
        engine.close()
        return drawn

    on_disk = OffloadConfig(Placement(cache=Share(0, 0, 100)), tmp_path)
    assert tokens(on_disk) == tokens(OffloadConfig())


@settings(
    max_examples=6, phases=[Phase.explicit, Phase.generate],  # shrinking would take minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(st.lists(st.tuples(st.integers(0, 12), st.sampled_from(range(len(POLICIES))),
                          st.booleans()), min_size=8, max_size=8), st.integers(0, 100))  # fmt: skip
def test_requests_join_and_leave(
    tmp_path: Path, plan: list[tuple[int, int, bool]], kv: int
) -> None:
    """Eight requests that come when they like; some go early. Who stays gets the usual picture."""
    engine = offloaded(tmp_path, 50, kv, max_images=5)
    inboxes: list[list[Event]] = [[] for _ in plan]
    requests = [ask(seed=i, policy=POLICIES[p] or PolicyChoice()) for i, (_, p, _) in
                enumerate(plan)]  # fmt: skip
    for request, inbox, (steps, _, _) in zip(requests, inboxes, plan, strict=True):
        engine.add(request, inbox.append)
        for _ in range(steps):
            engine.step()
    for request, (_, _, leaves) in zip(requests, plan, strict=True):
        if leaves:
            engine.abort(request.id)
    while engine.step():
        pass
    engine.close()
    staying = [i for i, (_, _, leaves) in enumerate(plan) if not leaves]
    expected = draw(tiny_engine("native"), *(ask(seed=i, policy=POLICIES[plan[i][1]] or
                                                 PolicyChoice()) for i in staying))  # fmt: skip
    for i, [tokens] in zip(staying, expected, strict=True):
        assert inboxes[i][-1].tokens == tokens  # type: ignore[union-attr]


class TestBytes:
    def test_a_step_reads_each_layer_once_whatever_the_batch(self, tmp_path: Path) -> None:
        engine = offloaded(tmp_path, 100)
        stream = engine.offload.weights
        assert stream is not None
        draw(engine, ask(n=3, seed=1))
        assert stream.read_bytes == engine.counters.steps * stream.disk_bytes
        held = [t for i in range(2) for t in tensors_of(engine.model.layer_weights(i))]
        assert sum(t.nbytes for t in held) <= stream.disk_bytes
        engine.close()

    @pytest.mark.parametrize("policy", POLICIES[:2] + POLICIES[2:])
    def test_kv_bytes_are_those_that_the_policy_keeps(
        self, tmp_path: Path, policy: PolicyChoice | None
    ) -> None:
        engine = offloaded(tmp_path, 0, 100)
        draw(engine, ask(seed=1, policy=policy or PolicyChoice(), sampling=Sampling(1.0)))
        group = engine.intake.group(policy or PolicyChoice())
        prompt, steps = engine.model.shape.prompt, range(engine.model.grid.tokens - 1)
        kept = sum(older(group.policy, t) for t in steps)
        everywhere = len(steps) * prompt * 2 * 2
        entry = group.layout.format.entry_bytes(group.layout.head_dim)
        assert engine.offload.read_bytes == (kept + everywhere) * entry
        assert engine.offload.read_bytes == sum(read_bytes(group.layout, prompt, t) for t in steps)
        new = len(steps) * written_bytes(group.layout) + prompt * 2 * 2 * entry
        assert engine.offload.written_bytes == new
        engine.close()


def older(policy: ReadPolicy, t: int) -> int:
    """Keys stored for the query at t besides its own, over layers and heads."""
    return sum(
        len(set(policy.resident(layer, head, t)) - {t})
        for layer in range(policy.heads.layers)
        for head in range(policy.heads.kv_heads)
    )


@given(
    st.integers(1, 5), st.integers(0, 4), st.lists(st.integers(1, 16), min_size=2, max_size=2),
    st.integers(0, 15), st.sampled_from([0, 4, 6]),
)  # fmt: skip
def test_runs_hold_every_key_that_is_kept(
    prompt: int, anchors: int, rings: list[int], t: int, index: int
) -> None:
    """Each kept key lies in exactly one run, where the cache has it, and nothing else does."""
    layout = CacheLayout(6, anchors, (tuple(rings), (3, 3)), 16, FORMATS["fp32"], index)
    staged, size = StagedLayer.of(layout, 0), layout.format.entry_bytes(16)
    found = sorted(
        at + i for at, to, length in staged.reads(prompt, t, False) for i in range(0, length, 1)
    )
    expected = set()
    for head, ring in enumerate(rings):
        first = layout.offsets[0][head]
        keys = [j for j in range(t) if j < anchors or j > t - ring]
        places = [*range(prompt), *(layout.visual_entry(0, head, j) for j in keys)]
        expected |= {(first + p) * size + i for p in places for i in range(size)}
        for j in keys:
            at = layout.index_offsets[0][head] + (layout.visual_entry(0, head, j) - 6) * index
            expected |= set(range(at, at + index))
    assert found == sorted(expected)
    for _at, to, length in staged.reads(prompt, t, False):
        assert to >= 0 and to + length <= staged.bytes


class TestTrouble:
    def test_a_disk_that_fills_up_fails_its_images_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = offloaded(tmp_path, 0, 70)
        write, calls = ScratchFile.write, []

        def full(self: ScratchFile, places: list[int], rows: torch.Tensor) -> int:
            calls.append(places)
            if len(calls) == 40:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(self, places, rows)

        monkeypatch.setattr(ScratchFile, "write", full)
        inboxes: list[list[Event]] = [[] for _ in eight()]
        for request, inbox in zip(eight(), inboxes, strict=True):
            engine.add(request, inbox.append)
        while engine.step():
            pass
        failures = [e for inbox in inboxes for e in inbox if isinstance(e, Failed)]
        assert len(failures) == 1 and "No space left on device" in failures[0].reason
        expected = draw(tiny_engine("native"), *eight())
        for inbox, tokens in zip(inboxes, expected, strict=True):
            for event in inbox:
                if isinstance(event, Finished):
                    assert event.tokens == tokens[event.index]
        assert engine.scheduler.stats().used_bytes == 0
        assert draw(engine, ask(seed=4)) == draw(tiny_engine("native"), ask(seed=4))
        engine.close()

    def test_weights_that_cannot_be_read_fail_the_step_and_no_more(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from engine.offload import flexgen_adapter

        engine, inbox = offloaded(tmp_path, 100), list[Event]()
        engine.add(ask(seed=1, n=2), inbox.append)
        for _ in range(5):
            engine.step()
        read = flexgen_adapter._read_file

        def broken(*_: object) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(flexgen_adapter, "_read_file", broken)
        while engine.step():
            pass
        assert sum(isinstance(e, Failed) and "Input/output" in e.reason for e in inbox) == 2
        monkeypatch.setattr(flexgen_adapter, "_read_file", read)
        assert draw(engine, ask(seed=4)) == draw(tiny_engine("native"), ask(seed=4))
        engine.close()

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"weights": Share(50, 50, 0)}, "has no GPU"),
            ({"activations": Share(0, 50, 50)}, "hidden states stay"),
            ({"compress_cache": True}, "compress"),
        ],
    )
    def test_placements_that_cannot_run(self, change: dict[str, object], message: str) -> None:
        config = OffloadConfig(Placement(**change))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=message):
            tiny_engine("native", offload=config)

    def test_a_folder_is_needed_and_must_be_one(self, tmp_path: Path) -> None:
        placement = Placement(Share(0, 0, 100))
        with pytest.raises(ValueError, match=r"100 % of weights on disk needs --offload-dir"):
            tiny_engine("native", offload=OffloadConfig(placement))
        (tmp_path / "file").touch()
        with pytest.raises(OffloadError, match="cannot write into the offload folder"):
            tiny_engine("native", offload=OffloadConfig(placement, tmp_path / "file"))

    def test_limits_are_checked_with_numbers(self, tmp_path: Path) -> None:
        beyond = start.host_memory_bytes() + (1 << 30)
        with pytest.raises(ValueError, match=r"GB is more than the .* GB this machine has"):
            tiny_engine("native", offload=OffloadConfig(host_memory_limit=beyond))
        config = OffloadConfig(host_memory_limit=8 << 20)
        with pytest.raises(OffloadError, match=r"KV cache 0.0671 GB.*limit is 0.00839 GB"):
            tiny_engine("native", offload=config)
        disk = OffloadConfig(
            Placement(cache=Share(0, 0, 100)), tmp_path, 8 << 20, staging_bytes=1 << 20
        )
        tiny_engine("native", offload=disk).close()

    def test_a_cache_larger_than_the_disk_is_refused(self, tmp_path: Path) -> None:
        config = OffloadConfig(Placement(cache=Share(0, 0, 100)), tmp_path)
        with pytest.raises(OffloadError, match="has no room for"):
            tiny_engine("native", offload=config, cache_bytes=1 << 50)
        assert not list(tmp_path.iterdir())


def test_layers_share_few_buffers(tmp_path: Path) -> None:
    """Host memory for weights does not grow with the depth of the model."""
    model = load_model("tiny", EngineConfig(model="tiny").load_options)
    layer_bytes = sum(t.nbytes for t in tensors_of(model.layer_weights(0)))
    for layers, buffers in ((1, 1), (2, 2), (5, 3), (6, 2)):
        stream = WeightStream(layers, Share(0, 0, 100), tmp_path)
        parts = [[torch.randn(layer_bytes // 4)] for _ in range(layers)]
        values = [part[0].clone() for part in parts]
        held: list[Callable[[], torch.Tensor]] = []
        for part in parts:
            box = Box(part[0])
            stream.add(box)
            held.append(lambda box=box: box.tensor)  # type: ignore[misc]
        assert stream.buffer_bytes <= buffers * (layer_bytes + 64)
        for _ in range(3):
            for layer in range(layers):
                stream.need(layer)
                assert torch.equal(held[layer](), values[layer])
        stream.close()


DEEP = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 16,
        "num_attention_heads": 8, "mode": "c2i", "image_size": 64}  # fmt: skip
PEAK = """
import json, re, sys, torch
from pathlib import Path
from engine.models.llamagen import LlamaGen
from engine.models.options import LoadOptions
from engine.offload.placement import Share
from engine.offload.weights import LayerKeeper
torch.ones(1) @ torch.ones(1)
config = LlamaGen.configure(json.loads(sys.argv[1]), None)
keeper = LayerKeeper(Share(0, 0, 100), Path(sys.argv[2]), True) if len(sys.argv) > 2 else None
import engine.offload.flexgen_adapter
def peak():  # of this program; ru_maxrss begins with what its parent had
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
start = peak()
model = LlamaGen.dummy("deep", config, LoadOptions("native", keep=keeper))
print(peak() - start)
keeper and keeper.close()
"""


def test_a_model_is_loaded_in_less_memory_than_it_takes(tmp_path: Path) -> None:
    """The most memory that loading takes, in kB, with and without the layers moved away."""

    def peak(*arguments: str) -> int:
        command = [sys.executable, "-c", PEAK, json.dumps(DEEP), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        return int(done.stdout)

    assert peak(str(tmp_path)) < peak() - 100_000  # of 16 layers of 13 MB


def test_a_published_family_draws_the_same(tmp_path: Path) -> None:
    plain = draw(Engine(llamagen()), ask("3", seed=1), ask("7", seed=2))
    for weights, kv in ((100, 0), (40, 100)):
        placement = Placement(Share(0, 100 - weights, weights), Share(0, 100 - kv, kv))
        engine = Engine(llamagen(OffloadConfig(placement, tmp_path)))
        assert engine.offload.weights is not None
        assert draw(engine, ask("3", seed=1), ask("7", seed=2)) == plain
        engine.close()
    assert not list(tmp_path.iterdir())


def llamagen(offload: OffloadConfig | None = None) -> EngineConfig:
    given = offload or OffloadConfig()
    return EngineConfig(model="small-llamagen", cache_bytes=64 << 20, offload=given)


@pytest.fixture(autouse=True)
def _small_llamagen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A published family small enough to draw with."""
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
             "num_attention_heads": 2, "mode": "c2i", "image_size": 64}  # fmt: skip
    known = loading.presets()
    known["small-llamagen"] = loading.Preset("small-llamagen", "llamagen", "", None, True, small)
    monkeypatch.setattr(loading, "presets", lambda: known)


class Box:
    """A layer with one tensor, as the engine's are objects with attributes."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


Box.__module__ = "engine.test"


def test_dense_reads_grow_by_a_key_a_step() -> None:
    grid = Grid(4, 4)
    policy = build("dense", grid, Heads(2, 3), 0.0, {}, "tiny")
    layout = CacheLayout.of(policy, 5, 16, FORMATS["bf16"])
    steps = [read_bytes(layout, 5, t) for t in range(15)]
    assert steps == [(5 + t) * 2 * 3 * 64 for t in range(15)]
