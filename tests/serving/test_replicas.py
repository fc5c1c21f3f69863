"""A server over several engines: what it tells of them, and who may change them."""

import json
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import httpx
import pytest

import cli
from engine.service_api import FleetError, Health, ReplicaState, ReplicaStatus
from scheduler.jobs.store import JobsConfig
from serving.config import ServerConfig
from serving.keys import ApiKey
from tests.fakes import FakeService, wait_until
from tests.live import serving
from tests.serving.jobs import submit, tasks

URL = "/v1/bishop/replicas"
ADMIN, USER = {"authorization": "Bearer admin-key"}, {"authorization": "Bearer user-key-1"}


class FakeFleet(FakeService):
    """One engine that says it is two, of which the second is being replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[object] = []
        self.engines = 1

    def health(self) -> Health:
        return replace(super().health(), alive=self.engines > 0, engines=self.engines,
                       replacing=self.engines < 2)  # fmt: skip

    def replicas(self) -> tuple[ReplicaStatus, ...]:
        ready = ReplicaStatus("replica-0", ReplicaState.READY, "a", 7, 3, 40, 100, 0, None, 9.0)
        lost = ReplicaStatus("replica-1", ReplicaState.LOST, "b", None, 0, 0, 0, 2, "boom", 1.0)
        return ready, lost

    def scale(self, replicas: int) -> None:
        self.done.append(replicas)

    def drain(self, name: str) -> None:
        if name != "replica-0":
            raise FleetError(f"there is no replica {name!r}")
        self.done.append(("drain", name))

    def restart(self, name: str | None = None) -> None:
        self.done.append(("restart", name))


@pytest.fixture
def fleet() -> FakeFleet:
    return FakeFleet()


def key(name: str, secret: str, admin: bool) -> ApiKey:
    return ApiKey(name=name, digest=sha256(secret.encode()).digest(), admin=admin)


@pytest.fixture
def open_server(fleet: FakeFleet) -> Iterator[httpx.Client]:
    with serving(fleet, ServerConfig()) as url, httpx.Client(base_url=url) as client:
        yield client


@pytest.fixture
def guarded(fleet: FakeFleet) -> Iterator[httpx.Client]:
    keys = (key("admin", "admin-key", True), key("user", "user-key-1", False))
    config = ServerConfig(keys=keys)
    with serving(fleet, config) as url, httpx.Client(base_url=url) as client:
        yield client


def test_what_it_tells(open_server: httpx.Client) -> None:
    found = open_server.get(URL).json()["data"]
    assert [(each["name"], each["state"]) for each in found] == [
        ("replica-0", "ready"),
        ("replica-1", "lost"),
    ]
    assert found[1]["reason"] == "boom"
    metrics = open_server.get("/metrics").text
    assert 'bishop:replica_up{replica="replica-1"} 0.0' in metrics
    assert 'bishop:replica_restarts_total{replica="replica-1"} 2.0' in metrics


def test_health_while_replicas_are_replaced(fleet: FakeFleet, open_server: httpx.Client) -> None:
    assert open_server.get("/health").json() == {"status": "degraded", "engines": 1}
    assert open_server.get("/ready").status_code == 200
    fleet.engines = 2
    assert open_server.get("/health").json()["status"] == "ok"
    fleet.engines = 0
    for path in ("/health", "/ready"):
        answer = open_server.get(path)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "no_replica"


def test_changes(fleet: FakeFleet, open_server: httpx.Client) -> None:
    for path, body in (
        ("/scale", {"replicas": 3}),
        ("/restart", None),
        ("/replica-0/restart", None),
        ("/replica-0/drain", None),
    ):
        assert open_server.post(URL + path, json=body).status_code == 202
    assert fleet.done == [3, ("restart", None), ("restart", "replica-0"), ("drain", "replica-0")]


@pytest.mark.parametrize("body", [{"replicas": 0}, {"replicas": "x"}, {}, {"n": 2}, [], "x"])
def test_a_number_that_makes_no_sense(
    fleet: FakeFleet, open_server: httpx.Client, body: object
) -> None:
    answer = open_server.post(f"{URL}/scale", json=body)
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert not fleet.done


def test_an_unknown_replica(open_server: httpx.Client) -> None:
    answer = open_server.post(f"{URL}/x/drain")
    assert answer.status_code == 400
    assert "no replica 'x'" in answer.json()["error"]["message"]


def test_only_an_admin_changes(fleet: FakeFleet, guarded: httpx.Client) -> None:
    assert guarded.get(URL).status_code == 401
    assert guarded.get(URL, headers=USER).status_code == 200
    assert guarded.post(f"{URL}/restart", headers=USER).status_code == 403
    assert guarded.post(f"{URL}/restart", headers=ADMIN).status_code == 202
    assert len(fleet.done) == 1


def test_lines_are_taken_for_every_engine_that_draws(fleet: FakeFleet, tmp_path: Path) -> None:
    fleet.frozen = True
    jobs = JobsConfig(folder=tmp_path)
    config = ServerConfig(jobs=jobs, batch_lines=3, poll_seconds=0.05)
    with serving(fleet, config) as url, httpx.Client(base_url=url, timeout=20) as http:
        submit(http, tasks(12))
        assert wait_until(lambda: len(fleet.seen) == 3)
        fleet.engines = 2
        assert wait_until(lambda: len(fleet.seen) == 6)
        assert not wait_until(lambda: len(fleet.seen) > 6, 0.3)
        fleet.frozen = False
        assert wait_until(lambda: len(fleet.seen) == 12)


def test_one_engine_has_no_replicas() -> None:
    with serving(FakeService(), ServerConfig()) as url:
        answer = httpx.get(url + URL)
    assert answer.status_code == 404
    assert "--replicas" in answer.json()["error"]["message"]


class TestCommand:
    def test_list_and_change(
        self, fleet: FakeFleet, open_server: httpx.Client, capsys: pytest.CaptureFixture[str]
    ) -> None:
        url = ["--url", str(open_server.base_url)]
        assert cli.main(["replicas", "list", *url]) == 0
        shown = capsys.readouterr().out
        assert "replica-0" in shown and "ready" in shown and "boom" in shown
        assert cli.main(["replicas", "scale", "3", *url, "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)["data"]) == 2
        assert cli.main(["replicas", "restart", *url]) == 0
        assert cli.main(["replicas", "drain", "replica-0", *url]) == 0
        assert fleet.done == [3, ("restart", None), ("drain", "replica-0")]

    def test_refusals_are_one_line(
        self, open_server: httpx.Client, capsys: pytest.CaptureFixture[str]
    ) -> None:
        url = ["--url", str(open_server.base_url)]
        assert cli.main(["replicas", "drain", "x", *url]) == 2
        assert "no replica 'x'" in capsys.readouterr().err
        assert cli.main(["replicas", "drain", "..", *url]) == 2

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--replicas", "none"], "--replicas"),
            (["--replicas", "0"], "--replicas"),
            (["--ray-address", "auto"], "--replicas"),
        ],
    )
    def test_serve_flags(
        self, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        flags = ["serve", "--model", "tiny", "--port", "0", "--data", str(tmp_path)]
        assert cli.main([*flags, *arguments]) == 2
        captured = capsys.readouterr().err
        assert said in captured and captured.count("\n") == 1
