"""The HTTP service over a fake engine: OpenAI's client, error shapes, streams, disconnects."""

import base64
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from scheduler.request import PolicyChoice
from serving.body import GenerationBody
from serving.config import ServerConfig
from tests.fakes import FakeService, wait_until
from tests.live import serving

PATH = "/v1/images/generations"


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def http(service: FakeService) -> Iterator[httpx.Client]:
    with serving(service) as url, httpx.Client(base_url=url, timeout=10) as client:
        yield client


@pytest.fixture
def client(http: httpx.Client) -> Iterator[openai.OpenAI]:
    url = f"{http.base_url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def draw(http: httpx.Client, **body: Any) -> httpx.Response:
    return http.post(PATH, json={"prompt": "a red apple"} | body)


def opened(data: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(data)))


def assert_error(response: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    """The response refuses in OpenAI's shape; returns the error."""
    assert response.status_code == status, response.text
    assert response.headers["x-request-id"]
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["param"] == param
    return error


class TestOpenAIClient:
    def test_draws_a_picture(self, client: openai.OpenAI) -> None:
        answer = client.images.generate(prompt="a red apple", model="fake")
        assert answer.data
        assert answer.data[0].b64_json
        assert answer.data[0].url is None
        picture = opened(answer.data[0].b64_json)
        assert (picture.format, picture.size) == ("PNG", (32, 32))
        assert (answer.size, answer.quality, answer.background) == ("32x32", "high", "opaque")
        assert answer.output_format == "png"
        assert answer.created > 1_700_000_000

    def test_usage_counts_the_prompt_once_and_every_picture(self, client: openai.OpenAI) -> None:
        usage = client.images.generate(prompt="a red apple", n=3).usage
        assert usage
        assert usage.output_tokens_details
        assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (3, 48, 51)
        assert usage.input_tokens_details.text_tokens == 3
        assert usage.output_tokens_details.image_tokens == 48

    def test_picture_k_is_the_picture_of_seed_plus_k(self, client: openai.OpenAI) -> None:
        many = client.images.generate(prompt="a", n=3, extra_body={"seed": 7})
        alone = client.images.generate(prompt="a", extra_body={"seed": 9})
        assert many.data
        assert alone.data
        assert many.data[2].b64_json == alone.data[0].b64_json
        assert many.data[0].b64_json != alone.data[0].b64_json

    def test_url_serves_the_picture(self, client: openai.OpenAI, http: httpx.Client) -> None:
        answer = client.images.generate(
            prompt="a", response_format="url", output_format="webp", size="64x48"
        )
        assert answer.data
        assert answer.data[0].url
        assert answer.data[0].b64_json is None
        file = http.get(answer.data[0].url)
        assert file.headers["content-type"] == "image/webp"
        assert Image.open(io.BytesIO(file.content)).size == (64, 48)

    def test_stream_with_partial_images(self, client: openai.OpenAI) -> None:
        stream = client.images.generate(
            prompt="a red apple", stream=True, partial_images=2, extra_body={"seed": 3}
        )
        events = list(stream)
        assert [event.type for event in events] == [
            "image_generation.partial_image",
            "image_generation.partial_image",
            "image_generation.completed",
        ]
        first, last = events[0], events[-1]
        assert first.type == "image_generation.partial_image"
        assert first.partial_image_index == 0
        assert last.type == "image_generation.completed"
        assert last.usage.total_tokens == 19
        assert opened(last.b64_json).size == (32, 32)

    def test_errors_have_the_client_s_types(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as bad:
            client.images.generate(prompt="a", n=11)
        assert (bad.value.param, bad.value.type) == ("n", "invalid_request_error")
        with pytest.raises(openai.NotFoundError) as unknown:
            client.images.generate(prompt="a", model="gpt-image-2")
        assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")

    def test_lists_and_gets_models(self, client: openai.OpenAI) -> None:
        assert [model.id for model in client.models.list()] == ["fake"]
        assert client.models.retrieve("fake").owned_by == "bishop"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("other/model")


class TestFields:
    def test_extensions_reach_the_engine(self, http: httpx.Client, service: FakeService) -> None:
        answer = draw(
            http,
            seed=5,
            negative_prompt="blurry",
            guidance_scale=2,
            temperature=0.5,
            top_k=10,
            top_p=0.8,
            policy="diagonal",
            sparsity=0.9,
            policy_options={"sink": 4, "exact": True, "share": 1.0, "name": "x"},
        )
        assert answer.headers["x-bishop-seed"] == "5"
        assert answer.json()["data"][0]["seed"] == 5
        request = service.seen[0]
        sampling = request.sampling
        assert (sampling.guidance_scale, sampling.temperature) == (2.0, 0.5)
        assert (sampling.top_k, sampling.top_p) == (10, 0.8)
        assert request.negative_prompt == "blurry"
        assert request.policy.name == "diagonal"
        assert request.policy.sparsity == 0.9
        options = dict(request.policy.options)
        assert options == {"sink": 4, "exact": True, "share": 1.0, "name": "x"}
        assert [type(options[key]) for key in ("sink", "exact", "share")] == [int, bool, float]

    def test_defaults_are_the_model_s(self, http: httpx.Client, service: FakeService) -> None:
        draw(http, n=None, size="auto", quality="auto", background="auto", moderation="auto")
        request = service.seen[0]
        assert request.sampling == service.model.sampling
        assert (request.n, request.size, request.policy) == (1, None, PolicyChoice())

    def test_a_seed_nobody_chose_is_told_and_draws_the_same(self, http: httpx.Client) -> None:
        first, second = draw(http), draw(http)
        assert first.headers["x-bishop-seed"] != second.headers["x-bishop-seed"]
        again = draw(http, seed=int(first.headers["x-bishop-seed"]))
        assert again.json()["data"] == first.json()["data"]

    def test_user_comes_back_as_safety_identifier(self, http: httpx.Client) -> None:
        assert draw(http, user="u1").json()["safety_identifier"] == "u1"
        assert draw(http, user="u1", safety_identifier="s").json()["safety_identifier"] == "s"
        assert "safety_identifier" not in draw(http).json()

    @pytest.mark.parametrize(("name", "format"), [("jpeg", "JPEG"), ("webp", "WEBP")])
    def test_formats_and_compression(self, http: httpx.Client, name: str, format: str) -> None:
        best = draw(http, seed=1, output_format=name).json()["data"][0]["b64_json"]
        small = draw(http, seed=1, output_format=name, output_compression=5).json()["data"][0]
        assert opened(best).format == format
        assert len(small["b64_json"]) < len(best)

    def test_server_policy_is_the_default_and_can_be_overridden(self) -> None:
        service = FakeService()
        config = ServerConfig(policy=PolicyChoice("diagonal", 0.9, (("sink", 4),)))
        with serving(service, config) as url, httpx.Client(base_url=url) as http:
            draw(http)
            draw(http, sparsity=0.5)
            draw(http, policy="dense")
        default, sparser, dense = (request.policy for request in service.seen)
        assert default == config.policy
        assert sparser == PolicyChoice("diagonal", 0.5, (("sink", 4),))
        assert dense == PolicyChoice()

    def test_a_policy_file_is_named_and_the_server_finds_it(self, tmp_path: Path) -> None:
        (tmp_path / "mini-90.yaml").touch()
        service = FakeService()
        options = {"policy": "diagonal", "policy_options": {"file": "mini-90.yaml"}}
        config = ServerConfig(policy_folder=tmp_path)
        with serving(service, config) as url, httpx.Client(base_url=url) as http:
            assert draw(http, **options).status_code == 200
        assert dict(service.seen[0].policy.options) == {"file": str(tmp_path / "mini-90.yaml")}


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": "   "}),
    ("prompt", {"prompt": "a" * 40_000}),
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": ["a"]}),
    ("prompt", {"prompt": "word " * 31}),
    ("n", {"n": 0}),
    ("n", {"n": 11}),
    ("n", {"n": "1"}),
    ("n", {"n": 1.5}),
    ("n", {"n": True}),
    ("size", {"size": "1024x1024"}),
    ("size", {"size": "big"}),
    ("size", {"size": "32X32"}),
    ("seed", {"seed": -1}),
    ("seed", {"seed": 2**63}),
    ("guidance_scale", {"guidance_scale": 0.5}),
    ("guidance_scale", {"guidance_scale": "high"}),
    ("negative_prompt", {"negative_prompt": "a", "guidance_scale": 1}),
    ("negative_prompt", {"negative_prompt": "a" * 40_000}),
    ("temperature", {"temperature": -1}),
    ("top_k", {"top_k": -1}),
    ("top_p", {"top_p": 0}),
    ("top_p", {"top_p": 1.5}),
    ("policy", {"policy": "diagonl"}),
    ("sparsity", {"policy": "diagonal", "sparsity": 1}),
    ("sparsity", {"policy": "diagonal", "sparsity": -0.1}),
    ("sparsity", {"sparsity": 0.9}),
    ("policy_options", {"policy_options": []}),
    ("policy_options.sink", {"policy": "diagonal", "policy_options": {"sink": None}}),
    ("policy_options.file", {"policy": "diagonal", "policy_options": {"file": "/etc/passwd"}}),
    ("policy_options.file", {"policy": "diagonal", "policy_options": {"file": "../a.yaml"}}),
    ("policy_options.mask", {"policy": "diagonal", "policy_options": {"mask": "a/b"}}),
    ("response_format", {"response_format": "file"}),
    ("response_format", {"response_format": "url", "stream": True}),
    ("output_format", {"output_format": "gif"}),
    ("output_compression", {"output_compression": 101, "output_format": "jpeg"}),
    ("output_compression", {"output_compression": 50}),
    ("background", {"background": "transparent"}),
    ("quality", {"quality": "low"}),
    ("moderation", {"moderation": "none"}),
    ("style", {"style": "vivid"}),
    ("svg", {"svg": {"model": "x"}}),
    ("user", {"user": "u" * 300}),
    ("stream", {"stream": "yes"}),
    ("partial_images", {"partial_images": 2}),
    ("partial_images", {"partial_images": 4, "stream": True}),
    ("n", {"n": 2, "stream": True}),
    ("steps", {"steps": 20}),
]


class TestBadInput:
    def test_each_is_a_400_that_names_its_field(
        self, http: httpx.Client, service: FakeService
    ) -> None:
        for param, body in REFUSED:
            error = assert_error(draw(http, **body), 400, param)
            assert error["type"] == "invalid_request_error", (param, body)
            assert error["code"], (param, body)
        assert not service.seen
        assert draw(http).status_code == 200

    def test_nan_and_infinity_are_refused(self, http: httpx.Client) -> None:
        json_header = {"content-type": "application/json"}
        for value in ("NaN", "Infinity", "-Infinity", "1e999"):
            text = f'{{"prompt": "a", "guidance_scale": {value}}}'
            assert_error(http.post(PATH, content=text, headers=json_header), 400, "guidance_scale")

    def test_unknown_names_come_with_the_nearest(self, http: httpx.Client) -> None:
        assert (
            "did you mean 'diagonal'"
            in assert_error(draw(http, policy="diagonl"), 400, "policy")["message"]
        )
        assert "did you mean 'top_k'" in assert_error(draw(http, topk=1), 400, "topk")["message"]
        assert "'fake'" in assert_error(draw(http, model="fakes"), 404, "model")["message"]

    @pytest.mark.parametrize(
        "text", [b"", b"{", b"[]", b"1", b'"a"', b"\xff\xfe", b"null", b'{"prompt": "\\ud800"}']
    )
    def test_what_is_no_json_object(self, http: httpx.Client, text: bytes) -> None:
        answer = http.post(PATH, content=text, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert set(answer.json()["error"]) == {
            "message",
            "type",
            "param",
            "code",
        }

    def test_deep_nesting(self, http: httpx.Client) -> None:
        text = '{"prompt": ' + "[" * 100_000
        answer = http.post(PATH, content=text, headers={"content-type": "application/json"})
        assert answer.status_code == 400

    def test_the_body_is_never_repeated(self, http: httpx.Client) -> None:
        secret = "secret" * 100
        for body in ({"n": secret}, {secret: 1}, {"policy": secret[:200]}, {"style": secret}):
            assert secret[:100] not in draw(http, **body).text

    def test_media_type_and_size(self, http: httpx.Client) -> None:
        error = assert_error(http.post(PATH, data={"prompt": "a"}), 415)
        assert "Content-Type" in error["message"]
        assert_error(draw(http, user="a" * 2_000_000), 413)

        def chunks() -> Iterator[bytes]:
            yield from (b" " * 100_000 for _ in range(20))

        header = {"content-type": "application/json"}
        assert_error(http.post(PATH, content=chunks(), headers=header), 413)
        assert draw(http).status_code == 200

    def test_unknown_addresses_and_methods(self, http: httpx.Client) -> None:
        assert_error(http.get("/v1/images/generation"), 404)
        assert assert_error(http.get(PATH), 405)["code"] == "method_not_allowed"
        assert http.get(PATH).headers["allow"] == "POST"
        assert_error(http.get("/v1/images/files/../../etc/passwd"), 404)
        assert_error(http.get("/v1/images/files/nothing"), 404)

    def test_emoji_and_other_scripts_are_prompts(
        self, http: httpx.Client, service: FakeService
    ) -> None:
        for prompt in ("🍎", "красное яблоко", "赤いりんご", "تفاحة", "a\u0000b"):
            assert draw(http, prompt=prompt).status_code == 200
            assert service.seen[-1].prompt == prompt


class TestStream:
    def test_wire_format(self, http: httpx.Client) -> None:
        body = {"prompt": "a", "stream": True, "partial_images": 1, "output_format": "jpeg"}
        with http.stream("POST", PATH, json=body) as response:
            text = response.read().decode()
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-bishop-seed"].isdecimal()
        blocks = text.strip().split("\n\n")
        events = [block.split("\n") for block in blocks]
        assert [event[0] for event in events] == [
            "event: image_generation.partial_image",
            "event: image_generation.completed",
        ]
        partial, completed = (json.loads(event[1].removeprefix("data: ")) for event in events)
        shared = {"type", "b64_json", "created_at", "size", "quality", "background"}
        shared |= {"output_format"}
        assert set(partial) == shared | {"partial_image_index"}
        assert set(completed) == shared | {"usage", "bishop"}
        assert opened(partial["b64_json"]).format == "JPEG"

    def test_without_partials_there_is_one_event(self, client: openai.OpenAI) -> None:
        events = list(client.images.generate(prompt="a", stream=True))
        assert [event.type for event in events] == ["image_generation.completed"]

    def test_bad_input_is_refused_before_the_stream_starts(self, http: httpx.Client) -> None:
        assert_error(draw(http, stream=True, prompt="word " * 40), 400, "prompt")

    def test_a_failure_is_an_error_event(self, client: openai.OpenAI, service: FakeService) -> None:
        service.failing = 0
        refused = pytest.raises(openai.APIError, match="could not be drawn")
        with client.images.generate(prompt="a", stream=True) as events, refused:
            list(events)

    def test_a_quiet_stream_is_kept_open_by_comments(self) -> None:
        service = FakeService(step_seconds=0.02)
        config = ServerConfig(ping_seconds=0.05)
        with serving(service, config) as url, httpx.Client(base_url=url) as http:
            text = draw(http, stream=True).text
        assert text.startswith(": ping\n\n")
        assert text.count("event: image_generation.completed") == 1


class TestDisconnect:
    def test_a_waiting_client_that_leaves_frees_the_engine(
        self, http: httpx.Client, service: FakeService
    ) -> None:
        service.frozen = True
        with pytest.raises(httpx.ReadTimeout):
            http.post(PATH, json={"prompt": "a", "n": 4}, timeout=0.2)
        service.frozen = False
        assert wait_until(lambda: service.aborted == 4)
        assert draw(http).status_code == 200
        assert service.finished == 1

    def test_a_streaming_client_that_leaves_frees_the_engine(
        self, http: httpx.Client, service: FakeService
    ) -> None:
        service.step_seconds = 0.05
        body = {"prompt": "a", "stream": True, "partial_images": 3}
        with http.stream("POST", PATH, json=body) as response:
            next(response.iter_lines())
        assert wait_until(lambda: service.aborted == 1)
        assert service.finished == 0

    def test_one_that_leaves_does_not_hurt_another(self, service: FakeService) -> None:
        service.step_seconds = 0.02
        with serving(service) as url, httpx.Client(base_url=url) as http:
            with (
                httpx.Client(base_url=url) as other,
                other.stream(
                    "POST", PATH, json={"prompt": "a", "stream": True, "partial_images": 3}
                ) as response,
            ):
                answers: list[int] = []
                waiting = threading.Thread(target=lambda: answers.append(draw(http).status_code))
                waiting.start()
                next(response.iter_lines())
            waiting.join(10)
        assert answers == [200]
        assert service.aborted == 1


class TestService:
    def test_concurrent_requests_share_steps(
        self, client: openai.OpenAI, service: FakeService
    ) -> None:
        service.step_seconds = 0.02
        answers: dict[int, str | None] = {}

        def one(seed: int) -> None:
            data = client.images.generate(prompt="a", extra_body={"seed": seed}).data
            answers[seed] = data[0].b64_json if data else None

        threads = [threading.Thread(target=one, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert service.together > 1
        assert len(set(answers.values())) == 8

    def test_ids_are_fresh_and_reach_the_engine(
        self, http: httpx.Client, service: FakeService
    ) -> None:
        ids = [draw(http).headers["x-request-id"] for _ in range(3)]
        assert len(set(ids)) == 3
        assert [request.id for request in service.seen] == ids

    def test_health_tells_the_truth(self, http: httpx.Client, service: FakeService) -> None:
        assert http.get("/health").json() == {"status": "ok", "engines": 1}
        assert http.get("/ready").json() == {"status": "ready"}
        service.stuck_seconds = 61
        assert assert_error(http.get("/health"), 503)["code"] == "engine_stuck"
        service.dead = True
        for answer in (http.get("/health"), http.get("/ready"), draw(http)):
            assert assert_error(answer, 503)["code"] == "engine_dead"

    def test_a_failed_picture_is_a_500(self, http: httpx.Client, service: FakeService) -> None:
        service.failing = 1
        error = assert_error(draw(http, n=2), 500)
        assert error["type"] == "server_error"
        assert error["code"] == "image_failed"
        assert draw(http, n=1).status_code == 200

    def test_an_unforeseen_failure_says_nothing_of_itself(
        self, http: httpx.Client, service: FakeService, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(request: object) -> None:
            raise KeyError("/secret/path")

        monkeypatch.setattr(service, "stream", broken)
        assert "secret" not in assert_error(draw(http), 500)["message"]

    def test_metrics(self, http: httpx.Client) -> None:
        draw(http, n=2)
        text = http.get("/metrics").text
        for line in (
            "bishop:num_requests_running 0.0",
            "bishop:num_requests_waiting 0.0",
            "bishop:kv_cache_usage_perc 0.0",
            "bishop:e2e_request_latency_seconds_count 1.0",
            "bishop:request_queue_time_seconds_count 1.0",
            "bishop:kv_read_bytes_total 2000.0",
            "bishop:kv_resident_bytes 0.0",
            'bishop:images_total{outcome="finished"} 2.0',
            'bishop:images_total{outcome="aborted"} 0.0',
        ):
            assert f"\n{line}\n" in text

    def test_metrics_count_what_waits_and_runs(
        self, http: httpx.Client, service: FakeService
    ) -> None:
        service.frozen = True
        thread = threading.Thread(target=draw, args=(http,))
        thread.start()
        assert wait_until(lambda: "bishop:num_requests_waiting 1.0" in http.get("/metrics").text)
        service.step_seconds, service.frozen = 0.05, False
        assert wait_until(lambda: "bishop:num_requests_running 1.0" in http.get("/metrics").text)
        thread.join(10)

    def test_the_page_and_the_description(self, http: httpx.Client) -> None:
        assert http.get("/").headers["content-type"].startswith("text/html")
        paths = http.get("/openapi.json").json()["paths"]
        assert PATH in paths
        assert "/health" in paths


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
PLAUSIBLE = st.sampled_from([body for _, body in REFUSED] + [{}, {"n": 2}, {"stream": True}])
BODIES = st.dictionaries(st.sampled_from(sorted(GenerationBody.model_fields)), JSON, max_size=5)


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[httpx.Client]:
    with serving(FakeService(0.0)) as url, httpx.Client(base_url=url, timeout=10) as client:
        yield client


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(noise=BODIES, plausible=PLAUSIBLE, content=st.none() | st.binary(max_size=50))
def test_no_body_makes_the_server_fail(
    fuzzed: httpx.Client, noise: dict[str, Any], plausible: dict[str, Any], content: bytes | None
) -> None:
    text = json.dumps({"prompt": "a"} | plausible | noise).encode() if content is None else content
    answer = fuzzed.post(PATH, content=text, headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400, 404, 413)
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
