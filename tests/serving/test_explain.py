"""/v1/bishop, the additions to the Images API, and the page at /."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from scheduler.request import PolicyChoice
from serving.config import ServerConfig
from serving.keys import ApiKey
from tests.fakes import FakeService
from tests.live import serving

PATH = "/v1/images/generations"


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def http(service: FakeService, tmp_path: Path) -> Iterator[httpx.Client]:
    (tmp_path / "mini-90.yaml").touch()
    default = PolicyChoice("diagonal", 0.9, (("file", "/secret/place/mini-95.yaml"),))
    config = ServerConfig(policy=default, policy_folder=tmp_path)
    with serving(service, config) as url, httpx.Client(base_url=url, timeout=10) as client:
        yield client


def test_policies_with_options_defaults_and_files(http: httpx.Client) -> None:
    answer = http.get("/v1/bishop/policies").json()
    assert [policy["name"] for policy in answer["data"]] == ["dense", "diagonal"]
    assert (answer["layers"], answer["kv_heads"]) == (2, 3)
    assert answer["grids"]["32x32"] == {"height": 4, "width": 4, "row_tokens": 0}
    sink, file = answer["data"][1]["options"]
    assert sink == {
        "name": "sink", "types": ["int"], "default": 0, "required": False,
        "text": "leading keys that stay", "choices": None,
    }  # fmt: skip
    assert file["choices"] == ["mini-90.yaml"]


def test_of_the_default_policy_s_file_only_the_name_is_told(http: httpx.Client) -> None:
    answer = http.get("/v1/bishop/policies")
    assert answer.json()["default"]["policy_options"] == {"file": "mini-95.yaml"}
    assert "secret" not in answer.text


def test_read_set(http: httpx.Client, service: FakeService) -> None:
    body = {"policy": "diagonal", "sparsity": 0.5, "policy_options": {"sink": 2},
            "size": "64x48", "layer": 1, "head": 2, "position": 6, "picture": "abc"}  # fmt: skip
    answer = http.post("/v1/bishop/read_set", json=body).json()
    assert answer["reads"] == answer["resident"] == [[0, 6]]
    assert (answer["policy"], answer["sparsity"], answer["source"]) == ("diagonal", 0.5, "fixed")
    query = service.queries[-1]
    assert (query.layer, query.head, query.position) == (1, 2, 6)
    assert (query.size, query.picture) == ((64, 48), "abc")
    assert dict(query.policy.options)["sink"] == 2


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("layer", {"layer": 2}),
        ("layer", {"layer": -1}),
        ("head", {"head": "1"}),
        ("position", {"position": 1.5}),
        ("policy", {"policy": "diagonl"}),
        ("sparsity", {"sparsity": 1}),
        ("size", {"size": "1x1"}),
        ("policy_options.file", {"policy_options": {"file": "/etc/passwd"}}),
        ("picture", {"picture": "x" * 100}),
        ("layr", {"layr": 1}),
    ],
)
def test_a_read_set_that_cannot_be(http: httpx.Client, param: str, body: dict[str, object]) -> None:
    answer = http.post("/v1/bishop/read_set", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_queue(http: httpx.Client) -> None:
    http.post(PATH, json={"prompt": "a", "n": 2})
    assert http.get("/v1/bishop/queue").json() == {
        "images_running": 0, "images_waiting": 0, "images_finished": 2,
        "cache_bytes_used": 0, "cache_bytes_total": 1000, "tokens": 16,
    }  # fmt: skip


COST = {
    "tokens": 16, "seconds": 0.5, "queue_seconds": 0.1, "tokens_per_second": 32.0,
    "kv_read_bytes": 1000, "kv_resident_bytes": 2000, "density": 0.25,
}  # fmt: skip


def test_the_cost_of_every_picture_is_told(http: httpx.Client) -> None:
    answer = http.post(PATH, json={"prompt": "a", "n": 2, "seed": 5}).json()
    assert answer["bishop"] == [{"seed": 5} | COST, {"seed": 6} | COST]


def test_openai_s_client_takes_the_additions(http: httpx.Client) -> None:
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none") as client:
        answer = client.images.generate(prompt="a", extra_body={"seed": 5})
        assert answer.model_extra is not None
        assert answer.model_extra["bishop"] == [{"seed": 5} | COST]
        stream = client.images.generate(
            prompt="a", stream=True, partial_images=1, extra_body={"progress": True}
        )
        types = [event.type for event in stream]
    assert types.count("bishop.progress") == 16
    assert types[-1] == "image_generation.completed"


def events(text: str) -> list[dict[str, object]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


def test_progress_comes_only_when_asked_for(http: httpx.Client) -> None:
    plain = events(http.post(PATH, json={"prompt": "a", "stream": True, "seed": 1}).text)
    assert [event["type"] for event in plain] == ["image_generation.completed"]
    assert plain[0]["bishop"] == {"seed": 1} | COST
    body = {"prompt": "a", "stream": True, "progress": True}
    told = events(http.post(PATH, json=body).text)
    assert told[:2] == [
        {"type": "bishop.progress", "done": 1, "total": 16},
        {"type": "bishop.progress", "done": 2, "total": 16},
    ]
    refused = http.post(PATH, json={"prompt": "a", "progress": True}).json()["error"]
    assert refused["param"] == "progress"


def test_the_page_and_its_files_say_what_they_may_do(http: httpx.Client) -> None:
    for path in ("/", "/web/js/main.js", "/web/css/base.css", "/web/icons.svg"):
        answer = http.get(path)
        assert answer.status_code == 200, path
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-cache"
    assert http.get("/").headers["content-type"].startswith("text/html")
    assert "javascript" in http.get("/web/js/main.js").headers["content-type"]


def test_a_file_is_not_sent_twice(http: httpx.Client) -> None:
    etag = http.get("/web/js/main.js").headers["etag"]
    again = http.get("/web/js/main.js", headers={"if-none-match": etag})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "path", ["/web/", "/web/none.js", "/web/../pyproject.toml", "/web/%2e%2e/pyproject.toml"]
)
def test_nothing_but_the_page_s_files_is_served(http: httpx.Client, path: str) -> None:
    answer = http.get(path)
    assert answer.status_code == 404
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_looks_need_a_key_and_count_against_no_limit() -> None:
    digest = hashlib.sha256(b"sk-alice-1").digest()
    keys = (ApiKey(name="alice", digest=digest, requests_per_minute=1),)
    config = ServerConfig(keys=keys)
    with serving(FakeService(), config) as url, httpx.Client(base_url=url) as client:
        assert client.get("/v1/bishop/queue").status_code == 401
        client.headers["authorization"] = "Bearer sk-alice-1"
        assert {client.get("/v1/bishop/queue").status_code for _ in range(5)} == {200}
        assert client.get("/v1/models").status_code == 200
        assert client.get("/v1/models").status_code == 429
