"""A prompt becomes a picture through the real engine: HTTP and command line, preset `tiny`."""

import base64
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from cli import main
from engine.config import EngineConfig
from engine.service import EngineService
from sparse_attn.policies import POLICIES, options_of
from tests.fakes import wait_until
from tests.live import serving

PATH = "/v1/images/generations"
REFUSED = {**dict.fromkeys(("h2o", "tova", "alisa"), "reference"), "indexed": "file"}
"""Policies that cannot draw here, and the word that says what they lack."""


@pytest.fixture(scope="module")
def service() -> EngineService:
    return EngineService(EngineConfig(model="tiny", cache_bytes=64 << 20, threads=2))


@pytest.fixture(scope="module")
def http(service: EngineService) -> Iterator[httpx.Client]:
    with serving(service) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def client(http: httpx.Client) -> Iterator[openai.OpenAI]:
    url = f"{http.base_url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def pixels(data: str | None) -> np.ndarray:
    assert data is not None
    with Image.open(io.BytesIO(base64.b64decode(data))) as image:
        return np.asarray(image)


def drawn(http: httpx.Client, **body: Any) -> list[np.ndarray]:
    answer = http.post(PATH, json={"prompt": "word1 word2"} | body)
    assert answer.status_code == 200, answer.text
    return [pixels(picture["b64_json"]) for picture in answer.json()["data"]]


def test_the_client_gets_a_picture_with_true_counts(client: openai.OpenAI) -> None:
    answer = client.images.generate(prompt="word1 word2", n=2, extra_body={"seed": 1})
    assert answer.data
    assert pixels(answer.data[0].b64_json).shape == (32, 32, 3)
    assert answer.size == "32x32"
    assert answer.usage
    assert answer.usage.output_tokens == 2 * 64
    assert answer.usage.input_tokens > 0


def test_a_seed_draws_the_same_alone_together_and_on_the_command_line(
    http: httpx.Client, tmp_path: Path
) -> None:
    alone = [drawn(http, seed=seed)[0] for seed in (5, 6, 7)]
    together = drawn(http, seed=5, n=3)
    file = tmp_path / "cli.png"
    words = ["--model", "tiny", "--seed", "6", "-o", str(file), "--threads", "1"]
    assert main(["generate", "word1 word2", *words]) == 0
    assert all((a == b).all() for a, b in zip(alone, together, strict=True))
    assert (alone[0] != alone[1]).any()
    with Image.open(file) as image:
        assert (np.asarray(image) == alone[1]).all()


def test_partial_pictures_arrive_before_the_last(client: openai.OpenAI) -> None:
    stream = client.images.generate(prompt="word1", stream=True, partial_images=3)
    events = list(stream)
    assert [event.type.rpartition(".")[2] for event in events] == [
        *["partial_image"] * 3,
        "completed",
    ]
    shapes = {pixels(event.b64_json).shape for event in events}
    assert shapes == {(32, 32, 3)}


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_draws_or_says_why_not(http: httpx.Client, name: str) -> None:
    sparsity = {} if name == "dense" else {"sparsity": 0.5}
    answer = http.post(PATH, json={"prompt": "word1", "policy": name, **sparsity})
    if name in REFUSED:
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "policy")
        assert REFUSED[name] in error["message"]
        assert str(Path.cwd()) not in error["message"]
    else:
        assert answer.status_code == 200, answer.text
    assert http.get("/health").status_code == 200


def test_a_sparse_policy_reads_less(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    reports = {}
    for policy in (["dense"], ["diagonal", "--sparsity", "0.75"]):
        words = ["--model", "tiny", "-o", str(tmp_path / "a.png"), "--json", "--policy", *policy]
        assert main(["generate", "word1", *words]) == 0
        reports[policy[0]] = json.loads(capsys.readouterr().out)
    dense, diagonal = reports["dense"], reports["diagonal"]
    assert dense["density"] == 1.0
    assert diagonal["density"] < 1.0
    assert diagonal["kv_read_bytes"] < 0.5 * dense["kv_read_bytes"]
    assert diagonal["kv_resident_bytes"] <= dense["kv_resident_bytes"]


def test_concurrent_requests_share_steps(http: httpx.Client, service: EngineService) -> None:
    before = service.stats().steps
    threads = [
        threading.Thread(target=drawn, args=(http,), kwargs={"seed": seed, "n": 2})
        for seed in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert service.stats().steps - before < 6 * 64


def test_a_client_that_leaves_frees_its_memory(http: httpx.Client, service: EngineService) -> None:
    before = service.stats().images_aborted
    body = {"prompt": "word1", "stream": True, "partial_images": 3}
    with http.stream("POST", PATH, json=body) as response:
        next(response.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        http.post(PATH, json={"prompt": "word1", "n": 10}, timeout=0.02)
    assert wait_until(lambda: service.stats().images_aborted == before + 11)
    assert service.stats().cache_bytes_used == 0
    assert drawn(http)


def test_a_prompt_too_long_for_the_model(http: httpx.Client) -> None:
    for field in ("prompt", "negative_prompt"):
        body = {"prompt": "word1"} | {field: "word1 " * 31}
        error = http.post(PATH, json=body).json()["error"]
        assert error["param"] == field
        assert "30" in error["message"]


OPTION = st.none() | st.booleans() | st.integers(-5, 100) | st.floats(-5, 100) | st.text(max_size=9)
NAMES = sorted({key for name in POLICIES for key in options_of(name)})


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    policy=st.sampled_from(sorted(POLICIES)),
    sparsity=st.none() | st.floats(0, 1),
    options=st.dictionaries(st.sampled_from(NAMES), OPTION, max_size=3),
    sampling=st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.sampled_from([0, 1e-30, 1, 100]),
            "top_k": st.sampled_from([0, 1, 255, 2**31 - 1]),
            "top_p": st.sampled_from([1e-30, 0.5, 1]),
            "guidance_scale": st.sampled_from([1, 1.5, 100]),
            "negative_prompt": st.text(max_size=9),
        },
    ),
)
def test_no_request_kills_the_engine(
    http: httpx.Client,
    policy: str,
    sparsity: float | None,
    options: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    body = {"prompt": "word1", "policy": policy, "sparsity": sparsity, "policy_options": options}
    answer = http.post(PATH, json=body | sampling)
    assert answer.status_code in (200, 400), answer.text
    assert http.get("/health").status_code == 200


def test_mini_draws_what_was_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "apple.png"
    assert (
        main(["generate", "a red apple on a blue background", "--seed", "1", "-o", str(file)]) == 0
    )
    with Image.open(file) as image:
        red, green, blue = np.asarray(image).astype(int).transpose(2, 0, 1)
    assert red.shape == (192, 192)
    is_red, is_blue = red - np.maximum(green, blue) > 60, blue - red > 30
    assert 0.04 < is_red.mean() < 0.6
    assert is_blue.mean() > 0.3
    assert is_blue[:12].mean() > 0.8, "the background reaches the edge"
    assert is_red[48:144, 48:144].mean() > is_red[:24].mean(), "the apple is not at the edge"
