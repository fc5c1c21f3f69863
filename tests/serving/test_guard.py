"""The door: keys, limits, queues, slow bodies, and a server that leaves."""

import json
import logging
import threading
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from serving.config import ServerConfig
from serving.errors import ApiError
from serving.keys import KeyRing, load
from serving.limits import KeyLimits, Queue
from serving.logs import JsonFormatter
from serving.run import Server, listen
from serving.scope import RequestIdFilter
from tests.fakes import FakeService, wait_until
from tests.live import serving
from tests.serving.jobs import submit, tasks, until, upload
from tests.test_server import assert_error, draw

ALICE, BOB = "sk-alice-1234", "sk-bob-5678"


def keys_file(folder: Path, **limits: int) -> Path:
    path = folder / "keys.yaml"
    rows = "".join(f"\n    {name}: {value}" for name, value in limits.items())
    path.write_text(
        f"keys:\n  - name: alice\n    key: {ALICE}{rows}\n  - name: bob\n    key: {BOB}\n"
    )
    return path


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


class TestKeys:
    def test_only_who_has_one_may_ask(self, config: ServerConfig, tmp_path: Path) -> None:
        config = replace(config, keys=load(keys_file(tmp_path), {}))
        with serving(FakeService(), config) as url, httpx.Client(base_url=url) as http:
            wrong = (bearer("sk-wrong-000"), {"authorization": ALICE}, bearer("x" * 5000))
            for header in ({}, *wrong):
                answer = http.get("/v1/models", headers=header)
                assert assert_error(answer, 401)["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
                assert_error(http.post("/v1/images/generations", headers=header), 401)
                assert_error(upload(http, b"x"), 401)
            for path in ("/health", "/ready", "/metrics", "/"):
                assert http.get(path).status_code == 200
            http.headers.update(bearer(ALICE))
            assert http.get("/v1/models").status_code == 200
            picture = draw(http, response_format="url").json()["data"][0]["url"]
            assert httpx.get(picture).status_code == 200
            text = http.get("/metrics").text
            assert 'bishop:requests_rejected_total{reason="invalid_api_key"} 12.0' in text

    def test_each_key_has_its_own_jobs(self, config: ServerConfig, tmp_path: Path) -> None:
        config = replace(config, keys=load(keys_file(tmp_path, batches=1), {}))
        service = FakeService()
        with serving(service, config) as url, httpx.Client(base_url=url) as http:
            http.headers.update(bearer(ALICE))
            batch = until(http, submit(http, tasks(1))["id"])
            service.frozen = True
            submit(http, tasks(1))
            body = {"input_file_id": batch["input_file_id"],
                    "endpoint": "/v1/images/generations", "completion_window": "24h"}  # fmt: skip
            error = assert_error(http.post("/v1/batches", json=body), 429)
            assert error["code"] == "batch_limit_exceeded"
            assert error["type"] == "rate_limit_error"
            http.headers.update(bearer(BOB))
            assert http.get(f"/v1/batches/{batch['id']}").status_code == 404
            assert http.get(f"/v1/files/{batch['output_file_id']}/content").status_code == 404
            assert http.delete(f"/v1/files/{batch['input_file_id']}").status_code == 404
            assert http.get("/v1/batches").json()["data"] == []
            assert_error(http.post("/v1/batches", json=body), 400, "input_file_id")

    def test_files_and_environment(self, tmp_path: Path) -> None:
        ring = KeyRing(
            load(keys_file(tmp_path), {"BISHOP_API_KEYS": f"carol=sk-carol-1, {'x' * 9}"})
        )
        assert [getattr(ring.find(key), "name", None) for key in (ALICE, BOB, "sk-carol-1", "x" * 9,
                "nobody")] == ["alice", "bob", "carol", "key-2", None]  # fmt: skip
        assert not KeyRing(load(None, {}))

    @pytest.mark.parametrize(
        ("text", "part"),
        [
            ("keys:\n  - nam: a", "did you mean 'name'"),
            ("keys:\n  - name: a", "either key or sha256"),
            ("keys:\n  - {name: a, key: short}", "8 characters"),
            ("keys:\n  - {name: a, sha256: xyz}", "64 hexadecimal"),
            ("keys:\n  - {name: a/b, key: 12345678}", "letters"),
            ("keys:\n  - {name: a, key: 12345678, concurrent: 0}", "concurrent"),
            ("keys:\n  - {name: a, key: 12345678}\n  - {name: a, key: 123456789}", "same name"),
            ("key: []", "named 'keys'"),
            ("keys: 5", "list"),
            ("{", "YAML"),
        ],
    )
    def test_mistakes_are_named(self, text: str, part: str, tmp_path: Path) -> None:
        path = tmp_path / "keys.yaml"
        path.write_text(text)
        with pytest.raises(ValueError, match=part):
            load(path, {})
        with pytest.raises(ValueError, match="cannot read"):
            load(tmp_path / "nothing.yaml", {})


class TestLimits:
    def test_a_minute_s_requests(self, tmp_path: Path) -> None:
        now = [0.0]
        limits = KeyLimits(lambda: now[0])
        (alice, bob) = load(keys_file(tmp_path, requests_per_minute=3), {})
        for _ in range(3):
            with limits.place(alice):
                pass
        with pytest.raises(ApiError) as refused, limits.place(alice):
            pass
        assert refused.value.status == 429
        assert refused.value.headers == {"retry-after": "20"}
        with limits.place(bob):
            pass
        now[0] = 20.0
        with limits.place(alice):
            pass

    def test_requests_at_the_same_time(self, config: ServerConfig, tmp_path: Path) -> None:
        config = replace(config, keys=load(keys_file(tmp_path, concurrent=1), {}))
        service = FakeService()
        service.frozen = True
        with serving(service, config) as url, httpx.Client(base_url=url) as http:
            http.headers.update(bearer(ALICE))
            thread = threading.Thread(target=draw, args=(http,))
            thread.start()
            assert wait_until(lambda: service.seen)
            error = assert_error(http.get("/v1/models"), 429)
            assert error["code"] == "concurrency_limit_exceeded"
            service.frozen = False
            thread.join(10)
            assert http.get("/v1/models").status_code == 200

    def test_a_full_queue(self, config: ServerConfig) -> None:
        service = FakeService()
        service.frozen = True
        config = replace(config, queue_images=4)
        with serving(service, config) as url, httpx.Client(base_url=url) as http:
            answers: list[httpx.Response] = []

            def ask(n: int) -> None:
                answers.append(draw(http, n=n))

            threads = [threading.Thread(target=ask, args=(n,)) for n in (3, 1)]
            for thread in threads:
                thread.start()
            assert wait_until(lambda: len(service.seen) == 2)
            refused = draw(http)
            error = assert_error(refused, 429)
            assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert_error(draw(http, stream=True), 429)
            service.frozen = False
            for thread in threads:
                thread.join(10)
            assert [answer.status_code for answer in answers] == [200, 200]
            assert draw(http, n=10).status_code == 200  # alone, any size is taken
            assert draw(http).status_code == 200

    def test_the_wait_follows_the_speed(self) -> None:
        now = [0.0]
        queue = Queue(2, clock=lambda: now[0])
        for _ in range(10):
            now[0] += 2.0
            with queue.place(1):
                pass
        with queue.place(2), pytest.raises(ApiError) as refused, queue.place(4):
            pass
        assert refused.value.headers == {"retry-after": "8"}


class TestTime:
    def test_a_request_that_takes_too_long(self, config: ServerConfig) -> None:
        service = FakeService()
        service.frozen = True
        config = replace(config, request_seconds=0.2)
        with serving(service, config) as url, httpx.Client(base_url=url) as http:
            assert assert_error(draw(http), 504)["code"] == "request_timeout"
            streamed = draw(http, stream=True)
            assert streamed.status_code == 200
            assert "request_timeout" in streamed.text
            service.frozen = False
            assert wait_until(lambda: service.aborted == 2)
            assert draw(http).status_code == 200

    def test_a_body_that_stops(self, config: ServerConfig) -> None:
        import socket

        config = replace(config, body_seconds=0.2)
        with serving(FakeService(), config) as url:
            host, port = url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port)), timeout=10) as connection:
                connection.sendall(
                    b"POST /v1/images/generations HTTP/1.1\r\nHost: x\r\n"
                    b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
                )
                assert b"408" in connection.recv(1000).split(b"\r\n")[0]


class TestLeftovers:
    """An answer that comes before its body has been read must not spoil the connection."""

    def test_a_refused_body_costs_no_later_request(self, http: httpx.Client) -> None:
        one_by_one = httpx.Limits(max_connections=1)
        huge = {"prompt": "a" * (2 << 20)}
        with httpx.Client(base_url=http.base_url, limits=one_by_one) as client:
            for _ in range(20):
                refused = client.post("/v1/images/generations", json=huge)
                assert_error(refused, 413)
                assert "connection" not in refused.headers
                assert client.get("/v1/models").status_code == 200

    def test_after_a_long_rest_the_connection_ends(self, http: httpx.Client) -> None:
        import socket

        address = (http.base_url.host, http.base_url.port or 80)
        with socket.create_connection(address, timeout=10) as connection:
            connection.sendall(
                b"POST /v1/images/generations HTTP/1.1\r\nHost: x\r\n"
                b"Content-Type: application/json\r\nContent-Length: 99999999\r\n\r\n{"
            )
            answer = b""
            while piece := connection.recv(4096):
                answer += piece
        assert b" 413 " in answer.split(b"\r\n")[0]
        assert b"connection: close" in answer.lower()


class TestDrain:
    def test_new_is_refused_and_old_is_answered(self, config: ServerConfig) -> None:
        service = FakeService()
        config = replace(config, port=0, stop_seconds=20)
        claimed = listen(config)
        server = Server(service, config)
        thread = threading.Thread(target=server.run, args=([claimed],), daemon=True)
        service.start()
        thread.start()
        assert wait_until(lambda: server.started)
        url = f"http://127.0.0.1:{claimed.getsockname()[1]}"
        service.frozen = True
        answers: list[int] = []
        with httpx.Client(base_url=url, timeout=20) as http:
            waiting = threading.Thread(target=lambda: answers.append(draw(http).status_code))
            waiting.start()
            id = submit(http, tasks(50))["id"]
            assert wait_until(lambda: len(service.seen) == 17)
            server.should_exit = True
            assert wait_until(lambda: http.get("/ready").status_code == 503)
            refused = draw(http)
            assert assert_error(refused, 503)["code"] == "server_stopping"
            assert refused.headers["retry-after"]
            assert http.get("/health").status_code == 200
            service.frozen = False
            waiting.join(10)
        thread.join(20)
        service.stop()
        assert answers == [200]
        assert service.finished == 17  # the lines that ran have ended, no other was begun
        again = FakeService()
        with serving(again, config) as url, httpx.Client(base_url=url) as http:
            until(http, id)
        assert again.finished == 50 - 16

    def test_lines_that_do_not_end_are_given_back(self, config: ServerConfig) -> None:
        service = FakeService()
        service.frozen = True
        with serving(service, config) as url, httpx.Client(base_url=url) as http:
            id = submit(http, tasks(3))["id"]
            assert wait_until(lambda: len(service.seen) == 3)
        again = FakeService()
        start = time.monotonic()
        with serving(again, config) as url, httpx.Client(base_url=url) as http:
            until(http, id)
        assert again.finished == 3
        assert time.monotonic() - start < 10


class TestLogs:
    def test_json_lines(self) -> None:
        record = logging.LogRecord("bishop", logging.INFO, "", 1, "a %s", ("b",), None)
        record.http = {"method": "GET", "path": "/", "status": 200, "ms": 3}
        assert RequestIdFilter().filter(record)
        told = json.loads(JsonFormatter().format(record))
        assert told["message"] == "a b"
        assert (told["level"], told["request_id"], told["status"]) == ("info", "-", 200)
        assert told["time"].endswith("Z")

    def test_a_request_s_lines_have_its_id_and_its_key(
        self, config: ServerConfig, caplog: pytest.LogCaptureFixture, tmp_path: Path
    ) -> None:
        config = replace(config, keys=load(keys_file(tmp_path), {}))
        caplog.set_level(logging.INFO, "bishop.server")
        caplog.handler.addFilter(RequestIdFilter())
        with serving(FakeService(), config) as url, httpx.Client(base_url=url) as http:
            http.headers.update(bearer(ALICE))
            id = draw(http).headers["x-request-id"]
        mine = [record for record in caplog.records if getattr(record, "request_id", "") == id]
        assert len(mine) == 2
        assert {getattr(record, "key", None) for record in mine} == {"alice"}
        assert getattr(mine[-1], "http")["status"] == 200  # noqa: B009
