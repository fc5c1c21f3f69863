"""`bishop bench serve` against a server whose speed is known."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serve import intervals
from cli import main
from serving.config import ServerConfig
from tests.fakes import FakeService
from tests.live import serving


@pytest.fixture
def service() -> FakeService:
    return FakeService(0.002)


@pytest.fixture
def url(service: FakeService) -> Iterator[str]:
    with serving(service, ServerConfig()) as url:
        yield url


def bench(*words: str) -> int:
    return main(["bench", "serve", *words])


def last(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_keys_and_figures(
    url: str, service: FakeService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--num-prompts", "12", "--n", "2", "--max-concurrency", "3", "--goodput", "1e9"]
    saved = ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
    assert bench("--base-url", url, *words, *saved) == 0
    result = last(capsys)
    assert json.loads((tmp_path / "r.json").read_text()) == result
    assert (result["completed"], result["failed"], result["total_images"]) == (12, 0, 24)
    assert result["total_output_tokens"] == 24 * 16
    assert result["request_throughput"] == pytest.approx(12 / result["duration"])
    assert result["image_throughput"] == pytest.approx(24 / result["duration"])
    assert result["request_goodput"] == result["request_throughput"]
    assert result["p50_e2el_ms"] <= result["p99_e2el_ms"]
    assert result["mean_e2el_ms"] >= 16 * 2  # steps of 2 ms
    assert service.together <= 3
    assert [request.seed for request in service.seen[1:]].count(0) == 1


def test_streams_tell_the_first_partial(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--base-url", url, "--num-prompts", "4", "--stream", "--partial-images", "3") == 0
    result = last(capsys)
    assert result["completed"] == 4
    assert result["mean_ttft_ms"] < result["mean_e2el_ms"]


def test_a_rate_is_kept(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--num-prompts", "10", "--request-rate", "20", "--burstiness", "1000"]
    assert bench("--base-url", url, *words) == 0
    assert 0.4 < last(capsys)["duration"] < 5


def test_arrivals() -> None:
    assert intervals(5, float("inf"), 1.0, 0).sum() == 0
    steady, bursty = intervals(4000, 10.0, 100.0, 0), intervals(4000, 10.0, 0.2, 0)
    assert steady.mean() == pytest.approx(0.1, rel=0.02)
    assert bursty.mean() == pytest.approx(0.1, rel=0.2)
    assert bursty.std() > 5 * steady.std()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--num-prompts", "0"], "--num-prompts"),
        (["--request-rate", "-1"], "--request-rate"),
        (["--extra-body", "{"], "--extra-body"),
        (["--extra-body", '{"policy": "none"}'], "unknown policy"),
        (["--metric-percentiles", "200"], "--metric-percentiles"),
        (["--prompts", "nothing.txt"], "nothing.txt"),
        (["--speed", "9"], "--speed"),
    ],
)
def test_mistakes_are_one_line(
    url: str, words: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("--base-url", url, *words) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert part in told


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--base-url", "http://127.0.0.1:9", "--num-prompts", "1") == 2
    assert "does not draw" in capsys.readouterr().err
