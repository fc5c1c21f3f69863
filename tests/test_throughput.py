"""The throughput benchmark: what it prints, in which order, and that its numbers hang together."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import results_writer
from benchmarks.roofline import Ceiling, StepCost, linears, measure
from benchmarks.throughput import choice_of
from cli import main
from engine.config import EngineConfig
from engine.events import ImageStats
from engine.models.presets import load_model
from scheduler.request import PolicyChoice

QUICK = ["bench", "throughput", "--model", "tiny", "--num-prompts", "3", "--rounds", "2"]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[list[str], dict[str, Any]]:
    """The lines before the JSON object, and the object."""
    assert main([*QUICK, *words]) == 0
    lines, brace, rest = capsys.readouterr().out.partition("\n{")
    return lines.splitlines(), json.loads(brace + rest)


def test_ceiling_then_dense_then_policies_then_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "out.json"
    words = ["--policy", "diagonal:sink=2", "--policy", "lines:sparsity=0.5", "--n", "2"]
    lines, result = run(capsys, *words, "--output-json", str(file))
    assert "ceiling: memory read" in lines[0]
    assert "ceiling, the better" in lines[1]
    assert [line.split()[0] for line in lines[2:]] == ["dense", "diagonal", "lines"]
    assert json.loads(file.read_text()) == result
    results_writer.check(result)
    assert result["command"].startswith("bishop bench throughput --model tiny")
    dense, diagonal, rows = result["rows"]
    assert (diagonal["sparsity"], diagonal["policy_options"]) == (0.9, {"sink": 2})
    assert rows["sparsity"] == 0.5
    assert dense["speedup"] == 1.0
    assert diagonal["kv_read_bytes_per_image"] < dense["kv_read_bytes_per_image"]


def test_the_numbers_hang_together(capsys: pytest.CaptureFixture[str]) -> None:
    _, result = run(capsys, "--n", "2")
    for row in result["rows"]:
        assert (row["num_requests"], row["num_images"]) == (3, 6)
        assert row["total_num_tokens"] == 6 * 64
        assert len(row["elapsed_times"]) == 2
        assert min(row["elapsed_times"]) <= row["elapsed_time"] <= max(row["elapsed_times"])
        assert row["images_per_second"] == pytest.approx(6 / row["elapsed_time"])
        assert row["tokens_per_second"] == pytest.approx(64 * row["images_per_second"])
        assert 0 < row["avg_latency"] <= max(row["elapsed_times"])
        assert row["percentiles"]["50"] <= row["percentiles"]["99"]
        assert 0 < row["share_of_ceiling"] < 1


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--num-prompts", "0"], "--num-prompts"),
        (["--n", "11"], "--n"),
        (["--warmup", "-1"], "--warmup"),
        (["--policy", "diagonl"], "did you mean 'diagonal'"),
        (["--policy", "diagonal:sink"], "KEY=VALUE"),
        (["--policy", "diagonal:sparsity=x"], "sparsity"),
        (["--policy", "diagonal:resent=4"], "did you mean 'recent'"),
        (["--policy", "h2o"], "reference"),
        (["--sparsity", "1"], "--sparsity"),
        (["--model", "tinny"], "did you mean 'tiny'"),
        (["--output-json", "/no/such/folder/out.json"], "--output-json"),
        (["--nothing"], "--nothing"),
    ],
    ids=str,
)
def test_mistakes_are_one_line(
    words: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*QUICK, *words]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert part in told.err


def test_help_is_that_of_the_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", "throughput", "--help"])
    assert end.value.code == 0
    assert "--num-prompts" in capsys.readouterr().out


def test_a_policy_with_its_options() -> None:
    assert choice_of("dense", 0.9) == PolicyChoice()
    assert choice_of("diagonal", 0.9) == PolicyChoice("diagonal", 0.9)
    chosen = choice_of("stencil:sparsity=0.5,rows=8", 0.9)
    assert chosen == PolicyChoice("stencil", 0.5, (("rows", 8),))


def test_step_cost_counts_every_weight_and_every_read() -> None:
    config = EngineConfig(model="tiny")
    model = load_model("tiny", config.load_options)
    layers = list(linears(model))
    assert len(layers) == 4 * model.shape.layers + 1
    parameters = sum(layer.inputs * layer.outputs for layer in layers)
    entry = config.format.entry_bytes(model.shape.head_dim)
    stats = ImageStats(64, 10, 1.0, 0.0, 6400 * entry, kv_resident_bytes=1, density=1.0)
    cost = StepCost.of(model, config.format, stats, images=4, sequences=8)
    assert cost.kv_bytes == 4 * 100 * entry
    assert cost.flops == 2 * parameters * 8 + 2 * 4 * 100 * 2 * model.shape.head_dim


def test_the_slower_of_memory_and_arithmetic_bounds() -> None:
    cost = StepCost(images=2, weight_bytes=600, kv_bytes=400.0, flops=3000.0)
    assert cost.tokens_per_second(Ceiling(bandwidth=100.0, flops=1e9)) == 2 / 10
    assert cost.bound(Ceiling(bandwidth=100.0, flops=1e9)) == "memory"
    assert cost.tokens_per_second(Ceiling(bandwidth=1e9, flops=1000.0)) == 2 / 3
    assert cost.bound(Ceiling(bandwidth=1e9, flops=1000.0)) == "arithmetic"


def test_the_better_ceiling_counts() -> None:
    assert Ceiling(1.0, 4.0).or_better(Ceiling(2.0, 3.0)) == Ceiling(2.0, 4.0)


def test_the_ceiling_is_measured() -> None:
    ceiling = measure()
    assert 1e8 < ceiling.bandwidth < 1e13
    assert 1e8 < ceiling.flops < 1e14
