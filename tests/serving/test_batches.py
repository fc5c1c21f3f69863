"""/v1/batches: every line ends once, with the picture that its seed draws."""

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from scheduler.jobs.errors import StoreUnavailable
from scheduler.jobs.store import JobsConfig
from scheduler.request import PolicyChoice, Priority
from serving.config import ServerConfig
from tests.fakes import FakeService, wait_until
from tests.live import serving
from tests.scheduler.jobs.helpers import as_lines, task
from tests.serving.jobs import records, submit, tasks, until, upload
from tests.test_server import assert_error


class TestOpenAIClient:
    def test_a_batch_from_upload_to_results(
        self, client: openai.OpenAI, service: FakeService
    ) -> None:
        file = client.files.create(file=("in.jsonl", tasks(3)), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/images/generations",
            completion_window="24h",
            metadata={"project": "x"},
        )
        assert (batch.object, batch.metadata) == ("batch", {"project": "x"})
        assert batch.expires_at == batch.created_at + 86_400
        assert wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
        batch = client.batches.retrieve(batch.id)
        assert batch.request_counts is not None
        assert batch.request_counts.model_dump() == {"total": 3, "completed": 3, "failed": 0}
        assert batch.error_file_id is None
        assert batch.output_file_id is not None
        assert batch.in_progress_at and batch.finalizing_at and batch.completed_at
        content = client.files.content(batch.output_file_id).text
        first = json.loads(content.splitlines()[0])
        assert set(first) == {"id", "custom_id", "response", "error"}
        assert set(first["response"]) == {"status_code", "request_id", "body"}
        assert first["response"]["body"]["data"][0]["b64_json"]
        assert first["response"]["body"]["usage"]["output_tokens"] == 16
        assert {request.priority for request in service.seen} == {Priority.BATCH}
        output = client.files.retrieve(batch.output_file_id)
        assert (output.purpose, output.bytes) == ("batch_output", len(content))

    def test_lists_page_by_page(self, client: openai.OpenAI, http: httpx.Client) -> None:
        ids = [submit(http, tasks(1))["id"] for _ in range(3)]
        assert [batch.id for batch in client.batches.list(limit=2)] == ids[::-1]
        assert [batch.id for batch in client.batches.list(after=ids[2]).data] == ids[1::-1]


class TestLines:
    def test_errors_go_to_the_error_file_with_their_codes(self, http: httpx.Client) -> None:
        bodies: dict[str, Any] = {
            "good": {"prompt": "a", "seed": 3},
            "n": {"prompt": "a", "n": 99},
            "unknown": {"prompt": "a", "steps": 3},
            "empty": {"prompt": " "},
            "model": {"prompt": "a", "model": "gpt-image-2"},
            "stream": {"prompt": "a", "stream": True},
            "url": {"prompt": "a", "response_format": "url"},
            "long": {"prompt": "word " * 40},
        }
        data = as_lines([task(name, body=body) for name, body in bodies.items()])
        batch = until(http, submit(http, data)["id"])
        assert batch["request_counts"] == {"total": 8, "completed": 1, "failed": 7}
        output = records(http, batch["output_file_id"])
        errors = records(http, batch["error_file_id"])
        assert set(output) == {"good"}
        answers = {name: record["response"] for name, record in errors.items()}
        assert {name: answer["body"]["error"]["param"] for name, answer in answers.items()} == {
            "n": "n", "unknown": "steps", "empty": "prompt", "model": "model",
            "stream": "stream", "url": "response_format", "long": "prompt",
        }  # fmt: skip
        statuses = {name: answer["status_code"] for name, answer in answers.items()}
        assert statuses.pop("model") == 404
        assert set(statuses.values()) == {400}

    def test_pictures_are_those_of_single_requests(self, http: httpx.Client) -> None:
        data = as_lines(
            [
                task("named", body={"prompt": "a", "seed": 7, "n": 2, "output_format": "webp"}),
                task("drawn", body={"prompt": "b"}),
            ]
        )
        batch = until(http, submit(http, data)["id"])
        output = records(http, batch["output_file_id"])
        named = output["named"]["response"]["body"]
        single = {"prompt": "a", "seed": 7, "n": 2, "output_format": "webp"}
        alone = http.post("/v1/images/generations", json=single).json()
        assert named["data"] == alone["data"]
        seed = output["drawn"]["response"]["body"]["data"][0]["seed"]
        again = http.post("/v1/images/generations", json={"prompt": "b", "seed": seed}).json()
        assert output["drawn"]["response"]["body"]["data"] == again["data"]

    def test_a_failed_picture_is_an_error_of_its_line(
        self, http: httpx.Client, service: FakeService
    ) -> None:
        service.failing = 1
        data = as_lines([task("two", body={"prompt": "a", "n": 2}), task("one")])
        batch = until(http, submit(http, data)["id"])
        errors = records(http, batch["error_file_id"])
        assert errors["two"]["response"]["status_code"] == 500
        assert set(records(http, batch["output_file_id"])) == {"one"}

    def test_lines_in_the_engine_are_bounded(
        self, service: FakeService, config: ServerConfig
    ) -> None:
        from dataclasses import replace

        service.step_seconds = 0.005
        narrow = replace(config, batch_lines=3)
        with serving(service, narrow) as url, httpx.Client(base_url=url) as http:
            until(http, submit(http, tasks(20))["id"])
        assert service.together == 3

    def test_the_default_policy_is_that_of_creation(
        self, service: FakeService, config: ServerConfig
    ) -> None:
        from dataclasses import replace

        service.frozen = True
        first = replace(config, policy=PolicyChoice("diagonal", 0.5, (("sink", 4),)))
        with serving(service, first) as url, httpx.Client(base_url=url) as http:
            id = submit(http, tasks(2))["id"]
            until(http, id, "in_progress")
        service.frozen = False
        service.seen.clear()
        with serving(service, config) as url, httpx.Client(base_url=url) as http:
            until(http, id)
        assert {request.policy for request in service.seen} == {first.policy}


class TestValidation:
    def test_a_bad_file_fails_as_a_whole_and_says_where(
        self, http: httpx.Client, service: FakeService
    ) -> None:
        data = as_lines([task("a"), task("a"), task("b", method="GET")]) + b"{\n"
        batch = until(http, submit(http, data)["id"])
        assert batch["status"] == "failed"
        assert batch["failed_at"]
        assert batch["errors"]["object"] == "list"
        told = [(error["code"], error["line"]) for error in batch["errors"]["data"]]
        assert told == [
            ("duplicate_custom_id", 2), ("invalid_method", 3), ("invalid_json_line", 4)
        ]  # fmt: skip
        assert batch["output_file_id"] is batch["error_file_id"] is None
        assert not service.seen

    def test_bodies(self, http: httpx.Client) -> None:
        good = {
            "input_file_id": upload(http, tasks(1)).json()["id"],
            "endpoint": "/v1/images/generations",
            "completion_window": "24h",
        }
        for param, value in (
            ("input_file_id", "file-" + "0" * 32),
            ("input_file_id", "../x"),
            ("input_file_id", None),
            ("endpoint", "/v1/chat/completions"),
            ("completion_window", "1d"),
            ("completion_window", "0h"),
            ("completion_window", "721h"),
            ("metadata", {"a": 1}),
            ("metadata", {str(k): "" for k in range(17)}),
            ("metadata", {"k" * 65: ""}),
            ("output_expires_after", {"anchor": "created_at", "seconds": 1}),
            ("priority", 1),
        ):
            answer = http.post("/v1/batches", json=good | {param: value})
            assert assert_error(answer, 400, param)["code"]
        assert http.post("/v1/batches", json=good).status_code == 200

    def test_an_output_file_is_no_input(self, http: httpx.Client) -> None:
        batch = until(http, submit(http, tasks(1))["id"])
        answer = http.post(
            "/v1/batches",
            json={
                "input_file_id": batch["output_file_id"],
                "endpoint": "/v1/images/generations",
                "completion_window": "24h",
            },
        )
        assert_error(answer, 400, "input_file_id")


class TestCancel:
    def test_results_so_far_are_kept(self, http: httpx.Client, service: FakeService) -> None:
        service.step_seconds = 0.01
        id = submit(http, tasks(200))["id"]
        assert wait_until(
            lambda: http.get(f"/v1/batches/{id}").json()["request_counts"]["completed"] > 3
        )
        assert http.post(f"/v1/batches/{id}/cancel").json()["status"] in ("cancelling", "cancelled")
        batch = until(http, id)
        counts = batch["request_counts"]
        assert batch["status"] == "cancelled" and batch["cancelled_at"]
        assert counts["completed"] + counts["failed"] == counts["total"] == 200
        assert counts["completed"] < 200
        output = records(http, batch["output_file_id"])
        errors = records(http, batch["error_file_id"])
        assert len(output) == counts["completed"]
        assert set(output) | set(errors) == {f"line-{k}" for k in range(200)}
        assert not set(output) & set(errors)
        assert {record["error"]["code"] for record in errors.values()} == {"batch_cancelled"}
        assert assert_error(http.post(f"/v1/batches/{id}/cancel"), 409)["code"]

    def test_what_runs_is_aborted(self, http: httpx.Client, service: FakeService) -> None:
        service.frozen = True
        id = submit(http, tasks(2))["id"]
        assert wait_until(lambda: len(service.seen) == 2)
        http.post(f"/v1/batches/{id}/cancel")
        assert until(http, id)["status"] == "cancelled"
        service.frozen = False
        assert wait_until(lambda: service.aborted == 2)


class TestFaults:
    def test_a_dead_engine_is_not_the_fault_of_lines(
        self, http: httpx.Client, service: FakeService
    ) -> None:
        service.frozen = True
        id = submit(http, tasks(3))["id"]
        assert wait_until(lambda: len(service.seen) == 3)
        service.failing, service.dead, service.frozen = 0, True, False
        assert wait_until(lambda: service.failed == 3)
        assert until(http, id, "in_progress")["request_counts"]["failed"] == 0
        service.failing, service.dead = None, False
        assert until(http, id)["request_counts"] == {"total": 3, "completed": 3, "failed": 0}

    def test_a_store_that_fails_for_a_while_loses_nothing(
        self, http: httpx.Client, service: FakeService, tmp_path: Path
    ) -> None:
        service.step_seconds = 0.01
        id = submit(http, tasks(30))["id"]
        assert wait_until(lambda: service.finished > 3)
        database, away = tmp_path / "jobs.sqlite", tmp_path / "away"
        database.rename(away)
        error = assert_error(http.get(f"/v1/batches/{id}"), 503)
        assert error["code"] == "job_store_unavailable"
        assert str(tmp_path) not in error["message"]
        assert http.get(f"/v1/batches/{id}").headers["retry-after"]
        single = http.post("/v1/images/generations", json={"prompt": "a"})
        assert single.status_code == 200
        assert http.get("/health").status_code == 200
        assert wait_until(lambda: "bishop:job_store_up 0.0" in http.get("/metrics").text)
        away.rename(database)
        batch = until(http, id)
        assert batch["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
        assert len(records(http, batch["output_file_id"])) == 30
        assert "bishop:job_store_up 1.0" in http.get("/metrics").text

    def test_a_full_disk_is_told_and_waited_for(
        self, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from scheduler.jobs.storage import Writer

        id = submit(http, tasks(5))["id"]

        def full(self: Writer) -> None:
            raise StoreUnavailable("the job storage: No space left on device")

        monkeypatch.setattr(Writer, "commit", full)
        error = assert_error(upload(http, tasks(1)), 503)
        assert "No space left" in error["message"]
        assert http.post("/v1/images/generations", json={"prompt": "a"}).status_code == 200
        monkeypatch.undo()
        assert until(http, id)["status"] == "completed"

    def test_a_damaged_record_hides_no_other(self, http: httpx.Client, tmp_path: Path) -> None:
        import sqlite3

        ids = [submit(http, tasks(1))["id"] for _ in range(2)]
        for id in ids:
            until(http, id)
        with sqlite3.connect(tmp_path / "jobs.sqlite") as raw:
            raw.execute("update bishop_batches set labels = '{' where id = ?", (ids[0],))
        raw.close()
        assert_error(http.get(f"/v1/batches/{ids[0]}"), 500)
        assert [batch["id"] for batch in http.get("/v1/batches").json()["data"]] == [ids[1]]


class TestServers:
    def test_two_on_one_store_share_the_work(self, tmp_path: Path) -> None:
        config = ServerConfig(jobs=JobsConfig(folder=tmp_path), poll_seconds=0.05, batch_lines=2)
        one, other = FakeService(0.005), FakeService(0.005)
        with serving(one, config) as first, serving(other, config) as second:
            with httpx.Client(base_url=first) as http:
                batch = until(http, submit(http, tasks(40))["id"])
                output = records(http, batch["output_file_id"])
            with httpx.Client(base_url=second) as http:
                assert records(http, batch["output_file_id"]) == output
        assert len(output) == 40
        assert one.finished > 0 and other.finished > 0
        assert one.finished + other.finished == 40

    def test_a_restart_goes_on_at_once(self, config: ServerConfig) -> None:
        service = FakeService(0.01)
        with serving(service, config) as url, httpx.Client(base_url=url) as http:
            id = submit(http, tasks(60))["id"]
            assert wait_until(lambda: service.finished > 5)
        again = FakeService()
        with serving(again, config) as url, httpx.Client(base_url=url) as http:
            batch = until(http, id, seconds=10)
            assert len(records(http, batch["output_file_id"])) == 60
        assert 0 < again.finished < 60

    def test_interactive_requests_are_answered_meanwhile(self, http: httpx.Client) -> None:
        submit(http, tasks(100))
        answers: list[int] = []

        def ask() -> None:
            body = {"prompt": "a"}
            answers.append(http.post("/v1/images/generations", json=body).status_code)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert answers == [200] * 8
