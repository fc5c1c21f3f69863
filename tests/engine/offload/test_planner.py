"""The planner keeps its limits, gets no worse with more memory, and knows what it says."""

import json
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli import main
from engine.config import EngineConfig
from engine.models.presets import load_model, presets
from engine.offload import hardware, measure
from engine.offload.cost import CacheCost, Limits, predict
from engine.offload.geometry import ModelGeometry, geometry_of
from engine.offload.hardware import Cpu, Disk, Hardware, HardwareError, Rate
from engine.offload.layer_tensors import tensors_of
from engine.offload.placement import Share
from engine.offload.planner import BUSY, DAY, PEAK, Capacity, PlanError, plan
from sparse_attn.format import FORMATS
from sparse_attn.policies import build
from sparse_attn.policy import Heads, ReadPolicy

GB = 10**9
SOME = Rate(10e9)
CPU_ONLY = Hardware(
    "made up", "", 64 * GB, Rate(20e9), None,
    Cpu(0.5, ((1, 2, 1e11), (1, 32, 2e11), (4, 2, 5e10), (4, 32, 1e11)), SOME, 1e-4, 1e-4, 1e-6,
        1e-4, 1e-4),
    Disk(Rate(2e9), Rate(1e9)),
)  # fmt: skip


@cache
def geometry(name: str = "lumina-mgpt-7b-1024") -> ModelGeometry:
    return geometry_of(name, "bf16")


@cache
def policy(name: str, sparsity: float, model: str = "lumina-mgpt-7b-1024") -> ReadPolicy:
    g = geometry(model)
    return build(name, g.grid, Heads(g.layers, g.kv_heads), sparsity, {}, model)


def planned(limits: Limits, machine: Hardware, name: str = "dense", images: int | None = 4):  # type: ignore[no-untyped-def]
    chosen = policy(name, 0.0 if name == "dense" else 0.9)
    return plan(geometry(), chosen, FORMATS["bf16"], limits, machine, images)


MACHINES = st.sampled_from(["h200", "a40", "rtx4090", "cpu"]).map(
    lambda name: CPU_ONLY if name == "cpu" else replace(hardware.preset(name), disk=CPU_ONLY.disk)
)


@settings(max_examples=12)
@given(MACHINES, st.integers(1, 40), st.integers(1, 60), st.integers(0, 200), st.booleans())
def test_limits_are_kept(machine: Hardware, gpu: int, host: int, disk: int, sparse: bool) -> None:
    limits = Limits(host * GB, gpu * GB if machine.gpu else 0, disk * GB)
    try:
        found = planned(limits, machine, "window" if sparse else "dense")
    except PlanError:
        return
    used, limit = found.step.memory, {"gpu": limits.gpu, "cpu": limits.host, "disk": limits.disk}
    assert all(used[tier] <= limit[tier] for tier in used)
    for share in (found.placement.weights, found.placement.cache):
        assert abs(share.gpu + share.cpu + share.disk - 100) < 1e-6
        assert machine.gpu is not None or not share.gpu
        assert limits.disk or not share.disk
    assert found.step_seconds >= max(asdict(found.step.costs).values()) * geometry().layers


@settings(max_examples=10)
@given(MACHINES, st.integers(2, 30), st.integers(4, 40), st.integers(0, 100), st.data())
def test_more_memory_is_never_worse(
    machine: Hardware, gpu: int, host: int, disk: int, data: st.DataObject
) -> None:
    few = Limits(host * GB, gpu * GB if machine.gpu else 0, disk * GB)
    extra = [data.draw(st.integers(0, 40)) * GB for _ in range(3)]
    many = Limits(few.host + extra[0], few.gpu + extra[1] if machine.gpu else 0,
                  few.disk + extra[2])  # fmt: skip
    try:
        less = planned(few, machine)
    except PlanError:
        return
    assert planned(many, machine).step_seconds <= less.step_seconds * (1 + 1e-6)


def test_the_block_is_the_best_of_those_tried() -> None:
    found = planned(Limits(100 * GB, 24 * GB), hardware.preset("h200"), images=None)
    assert found.images_per_second == pytest.approx(max(r for _, _, r in found.alternatives))
    sparse = planned(Limits(100 * GB, 24 * GB), hardware.preset("h200"), "window", None)
    assert sparse.images_per_second > 2 * found.images_per_second


def test_a_pinch_of_memory_names_what_is_lacking() -> None:
    with pytest.raises(PlanError, match=r"13.7 GB of weights and .* GB of KV.*1 GB of gpu, 2 GB"):
        planned(Limits(2 * GB, GB), hardware.preset("h200"))


def test_prediction_of_a_given_placement_follows_its_disk() -> None:
    g = geometry()
    cache_cost = CacheCost.of(policy("dense", 0.0), g, FORMATS["bf16"])
    seconds = [
        predict(g, cache_cost, CPU_ONLY, 4, Share(0, 100 - w, w), Share(0, 100 - c, c)).seconds
        for w, c in ((0, 0), (50, 0), (100, 0), (100, 50), (100, 100))
    ]
    assert seconds == sorted(seconds) and seconds[-1] > 1.5 * seconds[0]
    all_away = predict(g, cache_cost, CPU_ONLY, 4, Share(0, 0, 100), Share(0, 0, 100))
    read = g.layer_bytes + 8 * cache_cost.streamed / g.layers
    assert all_away.costs.disk_read >= read / 2e9


def test_streamed_bytes_are_the_mean_over_the_image() -> None:
    g = geometry("mini")
    cost = CacheCost.of(policy("dense", 0.0, "mini"), g, FORMATS["bf16"])
    middle = (g.grid.tokens - 2) / 2
    assert cost.streamed == pytest.approx(
        (g.prompt + middle) * g.layers * g.kv_heads * 256, rel=0.01
    )


@pytest.mark.parametrize(("name", "padding"), [("tiny", 0.5), ("mini", 0.02)])
def test_geometry_is_that_of_the_loaded_model(name: str, padding: float) -> None:
    model, g = load_model(name, EngineConfig(model=name).load_options), geometry_of(name, "fp32")
    shape = model.shape
    assert (g.layers, g.dim, g.kv_heads, g.head_dim, g.prompt) == (
        shape.layers, shape.dim, shape.kv_heads, shape.head_dim, shape.prompt
    )  # fmt: skip
    assert g.grid == model.grid
    held = sum(t.nbytes for t in tensors_of(model.layer_weights(0)))
    assert g.layer_bytes == pytest.approx(held, rel=padding)  # panels are padded


def test_every_preset_of_models_and_machines_is_readable() -> None:
    for name in presets():
        assert geometry_of(name, "bf16").weight_bytes > 0
    assert set(hardware.presets()) == {"a40", "a6000", "h200", "rtx4090"}
    for machine in hardware.presets().values():
        assert machine.gpu is not None
        for rate in (machine.gpu.memory, machine.gpu.flops, machine.gpu.to_gpu):
            assert rate.source


def test_a_preset_with_a_wrong_key_names_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (hardware.FOLDER / "h200.yaml").read_text(encoding="utf-8")
    (tmp_path / "x.yaml").write_text(text.replace("to_gpu:", "to_gpux:"), encoding="utf-8")
    monkeypatch.setattr(hardware, "FOLDER", tmp_path)
    with pytest.raises(HardwareError, match="unknown key 'to_gpux'; did you mean 'to_gpu'"):
        hardware.presets()


def test_capacity_counts_machines_at_the_peak() -> None:
    found = planned(Limits(100 * GB, 141 * GB), hardware.preset("h200"), images=None)
    for images in (1, 10_000, 1_000_000):
        machines = Capacity(found, images, 60.0).machines
        need = images / DAY * PEAK
        assert machines * BUSY * found.images_per_second >= need
        assert machines == 1 or (machines - 1) * BUSY * found.images_per_second < need


class TestMeasuring:
    def test_once_and_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = []

        def measured(folder: Path | None) -> Hardware:
            calls.append(folder)
            return replace(CPU_ONLY, disk=replace(CPU_ONLY.disk, cached=SOME))  # type: ignore[type-var]

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(measure, "measure", measured)
        first = measure.this_machine(tmp_path)
        assert measure.this_machine(tmp_path) == first and len(calls) == 1
        assert measure.this_machine(tmp_path, again=True) == first and len(calls) == 2
        [file] = (tmp_path / "cache" / "bishop").iterdir()
        file.write_text("{", encoding="utf-8")
        assert measure.this_machine(tmp_path) == first and len(calls) == 3

    def test_figures_are_figures(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(measure, "DISK_BYTES", 1 << 20)
        monkeypatch.setattr(measure, "READ_BYTES", 1 << 20)
        found = measure.measure(tmp_path)
        assert found.cpu is not None and found.disk is not None and found.disk.cached is not None
        rates = [found.host_memory, found.cpu.attention, found.disk.read, found.disk.cached]
        assert all(1e6 < rate.reached < 1e13 for rate in rates)
        assert all(flops > 0 for _, _, flops in found.cpu.linear)
        assert not list(tmp_path.iterdir())
        assert measure._loaded(json.loads(json.dumps(asdict(found)))) == found


class TestCommand:
    def test_json_is_one_object_with_the_step(self, capsys: pytest.CaptureFixture[str]) -> None:
        flags = ["--hardware", "h200", "--gpu-memory-limit-gb", "24", "--images", "2"]
        assert main(["plan", "--model", "lumina-mgpt-7b-1024", *flags, "--json"]) == 0
        [found] = json.loads(capsys.readouterr().out)["plans"]
        assert found["step_seconds"] * found["tokens"] == pytest.approx(found["image_seconds"])
        assert found["images"] == 2 and found["memory_bytes"]["gpu"] < 24 * GB
        assert found["images_per_second"] == pytest.approx(2 / found["image_seconds"])

    def test_text_explains_itself(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["plan", "--model", "janus-pro-7b", "--hardware", "a40"]) == 0
        out = " ".join(capsys.readouterr().out.split())
        for part in ("janus-pro-7b on a40", "(predicted)", "bound by", "Assumptions", "datasheet"):
            assert part in out

    def test_capacity(self, capsys: pytest.CaptureFixture[str]) -> None:
        flags = ["--images-per-day", "100000", "--p95", "120", "--json"]
        assert main(["plan", "--model", "janus-pro-7b", "--hardware", "h200,rtx4090", *flags]) == 0
        told = json.loads(capsys.readouterr().out)
        for each in told["capacity"]:
            assert each["machines"] >= 1 and each["assumptions"]
            assert each["plan"]["image_seconds"] <= 120

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--hardware", "h20"], "did you mean 'h200'"),
            (["--hardware", "h200", "--gpu-memory-limit-gb", "500"], "h200 has 141 GB"),
            (["--hardware", "h200", "--model", "minni"], "unknown model 'minni'"),
            (["--hardware", "h200", "--kv-format", "x"], "unknown KV format"),
            (["--disk-limit-gb", "5"], "--offload-dir"),
            (["--hardware", "a40", "--images-per-day", "5", "--p95", "0.001"], "quickest image"),
        ],
    )
    def test_refusals(
        self, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["plan", *flags]) == 2
        told = capsys.readouterr().err
        assert message in told and told.count("\n") == 1
