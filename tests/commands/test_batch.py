"""`bishop batch`: from a file of prompts to files of pictures, with a server and without."""

import base64
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import commands.opening
from cli import main
from commands.following import file_stem
from scheduler.jobs.store import JobsConfig
from serving.config import ServerConfig
from tests.fakes import FakeService
from tests.live import serving

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def url(service: FakeService, tmp_path: Path) -> Iterator[str]:
    config = ServerConfig(jobs=JobsConfig(folder=tmp_path / "jobs"), poll_seconds=0.05)
    with serving(service, config) as url:
        yield url


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def bishop(*words: str) -> int:
    return main(["batch", *words])


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


class TestServer:
    def test_prompts_become_pictures(
        self, url: str, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (folder / "list.txt").write_text("a red apple\n\n  赤いりんご \n", encoding="utf-8")
        words = ("--wait", "-o", "out", "--size", "64x48", "--url", url)
        assert bishop("submit", "list.txt", *words) == 0
        shown = capsys.readouterr().out
        assert "2 pictures and 0 errors in out" in shown
        assert "completed" in shown
        with Image.open(folder / "out" / "line-1.png") as picture:
            assert picture.size == (64, 48)
        assert (folder / "out" / "line-3.png").exists()
        assert len((folder / "out" / "output.jsonl").read_text().splitlines()) == 2
        assert not (folder / "out" / "errors.jsonl").exists()

    def test_csv_fields_have_their_types(
        self, url: str, service: FakeService, folder: Path
    ) -> None:
        text = 'custom_id,prompt,seed,guidance_scale,n\nx,"a, b",7,2.5,2\ny,c,,,\n'
        (folder / "list.csv").write_text(text)
        assert bishop("submit", "list.csv", "--wait", "-o", "out", "--url", url, "--json") == 0
        one, other = sorted(service.seen, key=lambda request: request.prompt)
        assert (one.prompt, one.seed, one.n, one.sampling.guidance_scale) == ("a, b", 7, 2, 2.5)
        assert other.n == 1
        assert {path.name for path in (folder / "out").glob("*.png")} == {
            "x-0.png", "x-1.png", "y.png",
        }  # fmt: skip

    def test_the_commands_of_a_batch(
        self, url: str, service: FakeService, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        service.frozen = True
        lines = [{"prompt": "a", "seed": 1}, {"prompt": "b", "steps": 9, "custom_id": "../b"}]
        (folder / "list.jsonl").write_text("\n".join(map(json.dumps, lines)))
        assert bishop("submit", "list.jsonl", "--url", url, "--json") == 0
        id = told(capsys)["id"]
        assert bishop("status", id, "--url", url) == 0
        assert id in capsys.readouterr().out
        service.frozen = False
        for _ in range(200):
            assert bishop("status", id, "--url", url, "--json") == 0
            if told(capsys)["status"] == "completed":
                break
            time.sleep(0.05)
        assert bishop("list", "--url", url, "--json") == 0
        assert [batch["id"] for batch in told(capsys)["batches"]] == [id]
        assert bishop("results", id, "-o", "out", "--url", url) == 0
        assert "1 pictures and 1 errors" in capsys.readouterr().out
        assert (folder / "out" / "line-1.png").exists()
        assert "steps" in (folder / "out" / "errors.jsonl").read_text()
        assert bishop("cancel", id, "--url", url) == 2
        assert "can no longer be cancelled" in capsys.readouterr().err

    def test_cancel_and_wait(
        self, url: str, service: FakeService, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        service.frozen = True
        (folder / "list.txt").write_text("a\nb\n")
        assert bishop("submit", "list.txt", "--url", url, "--json") == 0
        id = told(capsys)["id"]
        assert bishop("cancel", id, "--url", url, "--json") == 0
        assert told(capsys)["status"] in ("cancelling", "cancelled")

    def test_a_bad_line_is_told(
        self, url: str, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        twice = {"custom_id": "a", "prompt": "x"}
        (folder / "list.jsonl").write_text("\n".join(map(json.dumps, [twice, twice])))
        assert bishop("submit", "list.jsonl", "--wait", "--url", url) == 1
        shown = capsys.readouterr().out
        assert "failed" in shown
        assert "line 2: an earlier line has the same custom_id" in shown


MISTAKES: list[tuple[list[str], str]] = [
    (["submit", "nothing.txt"], "nothing.txt"),
    (["submit", "list.pdf"], ".jsonl"),
    (["submit", "empty.txt"], "no prompt"),
    (["submit", "latin.txt"], "UTF-8"),
    (["submit", "bad.jsonl"], "line 2"),
    (["submit", "bad.csv"], "prompt"),
    (["submit", "number.csv"], "seed must be a whole number"),
    (["submit", "good.txt", "-o", "out"], "--wait"),
    (["submit", "good.txt", "--url", "http://127.0.0.1:9"], "does not answer"),
    (["submit", "good.txt", "--url", "nonsense"], "--url"),
    (["status"], "'id'"),
    (["run", "-i", "good.txt", "-o", "no/such/out.jsonl"], "no/such"),
    (["run", "-i", "good.txt", "-o", "letter.jsonl"], "something else"),
    (["run", "-i", "twice.jsonl", "-o", "out.jsonl"], "custom_id"),
]


@pytest.mark.parametrize(("words", "part"), MISTAKES, ids=lambda value: str(value)[:40])
def test_mistakes_are_one_line(
    words: list[str],
    part: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(commands.opening, "open_service", lambda *_, **__: FakeService())
    (folder / "good.txt").write_text("a\n")
    (folder / "empty.txt").write_text("\n \n")
    (folder / "latin.txt").write_bytes("Äpfel".encode("latin-1"))
    (folder / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt"\n')
    (folder / "bad.csv").write_text("text\na\n")
    (folder / "number.csv").write_text("prompt,seed\na,many\n")
    (folder / "letter.jsonl").write_text("Dear friend,\n")
    (folder / "twice.jsonl").write_text('{"custom_id": "a", "prompt": "a"}\n' * 2)
    assert bishop(*words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert part in shown.err


def test_ids_become_names_that_never_meet() -> None:
    ids = [
        "a",
        "A-b.c",
        "../../etc/passwd",
        "..",
        ".",
        "a b",
        "a_b",
        "x" * 300,
        "x" * 301,
        "/",
        "赤",
    ]
    names = [file_stem(id) for id in ids]
    assert len(set(names)) == len(ids)
    assert all("/" not in name and name.strip(".") and len(name) < 200 for name in names)
    assert names[:2] == ["a", "A-b.c"]


class TestOffline:
    @pytest.fixture
    def service(self, monkeypatch: pytest.MonkeyPatch) -> FakeService:
        fake = FakeService(0.0)
        monkeypatch.setattr(commands.opening, "open_service", lambda *_, **__: fake)
        return fake

    def test_results_have_the_shape_of_the_api(
        self, service: FakeService, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        lines = [{"prompt": "a", "seed": 3, "n": 2}, {"prompt": "b", "n": 99}]
        (folder / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
        assert bishop("run", "-i", "in.jsonl", "-o", "out.jsonl", "--json") == 1
        assert told(capsys) == {"total": 2, "completed": 1, "failed": 1, "output": "out.jsonl"}
        found = {r["custom_id"]: r for r in _records(folder / "out.jsonl")}
        body = found["line-1"]["response"]["body"]
        assert [picture["seed"] for picture in body["data"]] == [3, 4]
        assert Image.open(io.BytesIO(base64.b64decode(body["data"][0]["b64_json"])))
        error = found["line-2"]["response"]
        assert (error["status_code"], error["body"]["error"]["param"]) == (400, "n")

    def test_it_goes_on_where_it_was(self, service: FakeService, folder: Path) -> None:
        (folder / "in.txt").write_text("\n".join(f"picture {k}" for k in range(20)))
        assert bishop("run", "-i", "in.txt", "-o", "whole.jsonl") == 0
        whole = (folder / "whole.jsonl").read_bytes()
        cut = whole[: len(whole) * 2 // 3]
        (folder / "part.jsonl").write_bytes(cut)
        service.seen.clear()
        assert bishop("run", "-i", "in.txt", "-o", "part.jsonl") == 0
        assert len(service.seen) == 20 - cut.count(b"\n")
        pictures = [_pictures(folder / name) for name in ("whole.jsonl", "part.jsonl")]
        assert pictures[0] == pictures[1]
        assert bishop("run", "-i", "in.txt", "-o", "part.jsonl") == 0

    def test_a_dead_engine_is_no_failure_of_lines(
        self, service: FakeService, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (folder / "in.txt").write_text("a\nb\n")
        service.failing, service.dead = 0, True
        assert bishop("run", "-i", "in.txt", "-o", "out.jsonl") == 2
        assert "run it again" in capsys.readouterr().err
        assert (folder / "out.jsonl").read_bytes() == b""
        service.failing, service.dead = None, False
        assert bishop("run", "-i", "in.txt", "-o", "out.jsonl") == 0

    def test_a_killed_run_goes_on(self, folder: Path) -> None:
        (folder / "in.txt").write_text("\n".join(f"picture {k}" for k in range(40)))
        words = ["batch", "run", "-i", "in.txt", "-o", "out.jsonl", "--model", "tiny"]
        code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import cli; cli.main({words})"
        command, quiet = [sys.executable, "-c", code], subprocess.DEVNULL
        child = subprocess.Popen(command, cwd=folder, stdout=quiet, stderr=quiet)
        output = folder / "out.jsonl"
        for _ in range(1000):
            if output.exists() and output.stat().st_size > 10_000:
                break
            time.sleep(0.02)
        child.send_signal(signal.SIGKILL)
        child.wait()
        before = output.read_bytes().count(b"\n")
        done = subprocess.run(command, cwd=folder, stdout=quiet, timeout=120, check=False)
        assert done.returncode == 0
        assert len(_pictures(output)) == 40
        assert before > 0


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _pictures(path: Path) -> dict[str, str]:
    found = _records(path)
    pictures = {r["custom_id"]: r["response"]["body"]["data"][0]["b64_json"] for r in found}
    assert len(pictures) == len(found)
    return pictures
