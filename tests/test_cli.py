"""The `bishop` command: files, summaries, and one line for every mistake."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

import commands.opening
from cli import main
from commands.refusal import Refusal
from tests.fakes import FakeService, picture

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> FakeService:
    """The engine that commands open in this test."""
    fake = FakeService()
    monkeypatch.setattr(commands.opening, "open_service", lambda *_, **__: fake)
    return fake


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def opened(path: str) -> Image.Image:
    with Image.open(path) as image:
        image.load()
    return image


def bishop(*words: str) -> int:
    return main(list(words))


class TestGenerate:
    def test_one_picture_is_one_file(
        self, service: FakeService, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert bishop("generate", "a red apple", "-o", "apple.png", "--seed", "7") == 0
        pixels = np.asarray(opened("apple.png"))
        assert (pixels == picture(service.seen[0], 0)).all()
        told = capsys.readouterr()
        assert told.err == ""
        for part in ("apple.png", "seed 7", "tokens/s", "density 1.000", "KV read 4 kB"):
            assert part in told.out
        assert "resident 2 kB" in told.out

    def test_several_are_numbered_and_start_at_the_seed(
        self, service: FakeService, folder: Path
    ) -> None:
        assert bishop("generate", "a", "-o", "out.webp", "--n", "3", "--seed", "5") == 0
        names = sorted(path.name for path in folder.iterdir())
        assert names == ["out-0.webp", "out-1.webp", "out-2.webp"]
        assert bishop("generate", "a", "-o", "again.png", "--seed", "7", "--format", "png") == 0
        assert (np.asarray(opened("again.png")) == picture(service.seen[0], 2)).all()

    def test_the_contact_sheet_holds_them_all(self, service: FakeService, folder: Path) -> None:
        assert bishop("generate", "a", "b", "--n", "2", "--grid", "-o", "out.png") == 0
        assert opened("out.png").size == (68, 68)
        assert len(list(folder.glob("out-?.png"))) == 4

    def test_prompts_of_the_line_and_of_a_file_are_drawn_together(
        self, service: FakeService, folder: Path
    ) -> None:
        (folder / "list.txt").write_text("ein Haus\n\n  赤いりんご \n", encoding="utf-8")
        assert bishop("generate", "a", "--prompts", "list.txt", "--seed", "1") == 0
        assert [request.prompt for request in service.seen] == ["a", "ein Haus", "赤いりんご"]
        assert {request.seed for request in service.seen} == {1}
        assert len(list(folder.glob("out-?.png"))) == 3

    def test_every_flag_reaches_the_request(self, service: FakeService, folder: Path) -> None:
        flags = "--guidance-scale 2.5 --temperature 0.5 --top-k 9 --top-p 0.7 --size 64x48"
        policy = "--policy diagonal --sparsity 0.9 --policy-option sink=4"
        more = ["--policy-option", "on=true", "--policy-option", "x=0.5", "--policy-option", "y=z"]
        words = [*flags.split(), *policy.split(), *more, "--negative-prompt", "blurry"]
        assert bishop("generate", "a", *words) == 0
        request = service.seen[0]
        assert request.sampling.guidance_scale == 2.5
        assert request.sampling.temperature == 0.5
        assert (request.sampling.top_k, request.sampling.top_p) == (9, 0.7)
        assert request.size == (64, 48)
        assert request.negative_prompt == "blurry"
        assert (request.policy.name, request.policy.sparsity) == ("diagonal", 0.9)
        assert dict(request.policy.options) == {"sink": 4, "on": True, "x": 0.5, "y": "z"}

    def test_json_is_one_object_and_nothing_else(
        self, service: FakeService, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = ["--policy", "diagonal", "--sparsity", "0.5", "--json", "--seed", "3", "--n", "2"]
        assert bishop("generate", "a red apple", *words) == 0
        told = capsys.readouterr()
        assert told.err == ""
        report: dict[str, Any] = json.loads(told.out)
        assert [image["seed"] for image in report["images"]] == [3, 4]
        assert all(Path(image["path"]).is_file() for image in report["images"])
        assert report["policy"] == "diagonal"
        assert (report["tokens"], report["kv_read_bytes"]) == (32, 2000)
        assert report["density"] == 0.25
        assert report["tokens_per_second"] == pytest.approx(32 / report["seconds"])

    def test_metadata_only_when_asked(self, service: FakeService, folder: Path) -> None:
        bishop("generate", "a", "-o", "plain.png", "--seed", "3")
        bishop("generate", "a", "-o", "told.png", "--seed", "3", "--metadata")
        assert opened("plain.png").info == {}
        assert opened("told.png").info == {"seed": "3", "model": "fake"}

    def test_a_name_without_suffix_gets_one(self, service: FakeService, folder: Path) -> None:
        assert bishop("generate", "a", "-o", "v1.2/out", "--format", "jpeg") == 2
        assert bishop("generate", "a", "-o", "out", "--format", "jpeg") == 0
        assert opened("out.jpeg").format == "JPEG"

    def test_a_failed_picture_is_told_and_the_others_are_kept(
        self, service: FakeService, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        service.failing = 1
        assert bishop("generate", "a", "--n", "3") == 1
        assert sorted(path.name for path in folder.iterdir()) == ["out-0.png", "out-2.png"]
        assert "picture 1 was not drawn: the logits are not finite" in capsys.readouterr().err


MISTAKES: list[tuple[list[str], str]] = [
    ([], "PROMPT"),
    ([""], "empty"),
    (["a", "  "], "empty"),
    (["a" * 40_000], "32000"),
    (["word " * 31], "30 words"),
    (["a", "--n", "0"], "--n"),
    (["a", "--n", "11"], "--n"),
    (["a", "--n", "many"], "--n"),
    (["a", "--seed", "-1"], "--seed"),
    (["a", "--sparsity", "0.5"], "--sparsity"),
    (["a", "--policy", "diagonal", "--sparsity", "1"], "--sparsity"),
    (["a", "--policy", "diagonal", "--sparsity", "-0.1"], "--sparsity"),
    (["a", "--policy", "diagonal", "--sparsity", "nan"], "--sparsity"),
    (["a", "--policy", "diagonl"], "did you mean 'diagonal'"),
    (["a", "--policy-option", "sink"], "KEY=VALUE"),
    (["a", "--guidance-scale", "nan"], "--guidance-scale"),
    (["a", "--guidance-scale", "0"], "--guidance-scale"),
    (["a", "--temperature", "inf"], "--temperature"),
    (["a", "--top-k", "-1"], "--top-k"),
    (["a", "--top-p", "0"], "--top-p"),
    (["a", "--negative-prompt", "b", "--guidance-scale", "1"], "--negative-prompt"),
    (["a", "--size", "1000x1000"], "32x32"),
    (["a", "--size", "big"], "32x32"),
    (["a", "--format", "gif"], "--format"),
    (["a", "-o", "out.gif"], ".gif"),
    (["a", "-o", "out.png", "--format", "webp"], "--format"),
    (["a", "-o", "no/such/folder/out.png"], "no/such/folder"),
    (["a", "-o", "/proc/out.png"], "/proc"),
    (["a", "-o", "folder.png"], "folder"),
    (["a", "--prompts", "nothing.txt"], "nothing.txt"),
    (["a", "--prompts", "latin.txt"], "UTF-8"),
    (["--prompts", "empty.txt"], "PROMPT"),
    (["a", "--quality", "101"], "--quality"),
    (["a", "-o", "out.jpg", "--metadata"], "--metadata"),
    (["a", "--backend", "cuda"], "--backend"),
    (["a", "--threads", "0"], "--threads"),
    (["a", "--load-format", "pickle"], "--load-format"),
    (["a", "--polcy", "dense"], "--policy"),
]


class TestMistakes:
    @pytest.mark.parametrize(("words", "part"), MISTAKES, ids=lambda value: str(value)[:40])
    def test_one_line_and_exit_code_2(
        self,
        words: list[str],
        part: str,
        service: FakeService,
        folder: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        (folder / "folder.png").mkdir()
        (folder / "latin.txt").write_bytes("Äpfel".encode("latin-1"))
        (folder / "empty.txt").touch()
        assert bishop("generate", *words) == 2
        told = capsys.readouterr()
        assert told.out == ""
        assert told.err.count("\n") == 1
        assert told.err.startswith("bishop: ")
        assert part in told.err
        assert not service.seen

    def test_unknown_command(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert bishop("generat") == 2
        assert capsys.readouterr().err.count("\n") == 1

    @pytest.mark.parametrize("command", ["generate", "serve"])
    def test_unknown_model(self, command: str, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["a"] if command == "generate" else ["--port", "0"]
        assert bishop(command, *words, "--model", "minni", "--backend", "reference") == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        assert "did you mean 'mini'" in told
        assert "tiny" in told

    def test_foreign_weights(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (folder / "weights").mkdir()
        (folder / "weights" / "config.json").write_text('{"foreign": 1}')
        words = ["--model", "weights", "--backend", "reference"]
        assert bishop("generate", "a", *words) == 2
        assert "foreign" in capsys.readouterr().err

    def test_truncated_weights(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (folder / "weights").mkdir()
        (folder / "weights" / "config.json").write_text("{}")
        (folder / "weights" / "transformer.safetensors").write_bytes(b"\x40\0\0\0\0\0\0\0{")
        assert bishop("generate", "a", "--model", "weights", "--backend", "reference") == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        assert "transformer.safetensors" in told

    def test_an_engine_that_cannot_be_opened(
        self, monkeypatch: pytest.MonkeyPatch, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise Refusal("the kernels are not built:\nrun make build")

        monkeypatch.setattr(commands.opening, "open_service", refuse)
        assert bishop("generate", "a") == 2
        assert capsys.readouterr().err == "bishop: the kernels are not built: run make build\n"

    def test_serve_refuses_a_default_no_request_could_use(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = ["--port", "0", "--model", "tiny", "--backend", "reference", "--policy"]
        assert bishop("serve", *words, "diagonl") == 2
        assert "did you mean 'diagonal'" in capsys.readouterr().err
        assert bishop("serve", *words, "diagonal", "--policy-option", "sinks=4") == 2
        assert "did you mean 'sink'" in capsys.readouterr().err

    def test_port_in_use(self, capsys: pytest.CaptureFixture[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
            assert bishop("serve", "--port", port, "--model", "tiny") == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        assert port in told


class TestListing:
    def test_models(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert bishop("models", "--json") == 0
        found = {model["name"]: model for model in json.loads(capsys.readouterr().out)["models"]}
        assert found["tiny"]["missing"] is None
        assert "mini" in found
        assert bishop("models") == 0
        told = capsys.readouterr().out
        assert "ready" in told
        assert "Janus" in told

    def test_a_folder_that_is_no_model(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert bishop("models", str(folder)) == 2
        assert capsys.readouterr().err.count("\n") == 1

    def test_policies(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert bishop("policies", "--json") == 0
        found = {each["name"]: each for each in json.loads(capsys.readouterr().out)["policies"]}
        assert found["diagonal"]["sparsity"] is True
        assert found["dense"]["sparsity"] is False
        assert found["diagonal"]["options"]["sink"] == {
            "type": "int",
            "required": False,
            "default": 0,
        }
        assert bishop("policies") == 0
        assert "--policy-option sink=INT (default 0)" in capsys.readouterr().out


def process(*words: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    command = [sys.executable, *words]
    return subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)


@contextmanager
def started(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that serves: itself and its URL."""
    child = process(*words)
    try:
        assert child.stderr is not None
        first = child.stderr.readline()
        assert " at http://" in first, first
        yield child, first.split(" at ")[1].strip()
    finally:
        child.kill()
        child.wait()


class TestProcess:
    def test_help_is_fast_because_nothing_heavy_is_imported(self) -> None:
        heavy = "{'torch', 'numpy', 'fastapi', 'uvicorn', 'PIL'}"
        code = f"import sys, cli; cli.main(['--help']); sys.exit(bool({heavy} & set(sys.modules)))"
        child = process("-c", code)
        told, error = child.communicate(timeout=60)
        assert child.returncode == 0, error
        assert "generate" in told

    def test_ctrl_c_leaves_no_traceback(self, tmp_path: Path) -> None:
        code = (
            "import sys, commands.opening, cli; from tests.fakes import FakeService\n"
            "fake = FakeService(); fake.frozen = True\n"
            "commands.opening.open_service = lambda *a, **k: fake\n"
            "run = fake.run\n"
            "fake.run = lambda r: (print('drawing', flush=True), run(r))[1]\n"
            f"sys.exit(cli.main(['generate', 'a', '-o', '{tmp_path}/a.png']))"
        )
        child = process("-c", code)
        assert child.stdout is not None
        assert child.stdout.readline() == "drawing\n"
        child.send_signal(signal.SIGINT)
        _, error = child.communicate(timeout=60)
        assert child.returncode == 130
        assert error == "bishop: interrupted\n"

    @pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
    def test_serve_answers_and_stops_gracefully(self, stop: signal.Signals) -> None:
        with started("server.py", "--port", "0", "--model", "tiny") as (child, url):
            assert httpx.get(f"{url}/health").status_code == 200
            assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "tiny"
            child.send_signal(stop)
            _, error = child.communicate(timeout=60)
        assert child.returncode == 0
        assert "Traceback" not in error
        assert error.endswith("stopped\n")

    def test_what_still_runs_after_the_grace_is_answered(self) -> None:
        code = (
            "import sys, commands.opening, cli; from tests.fakes import FakeService\n"
            "fake = FakeService(); fake.frozen = True\n"
            "commands.opening.open_service = lambda *a, **k: fake\n"
            "sys.exit(cli.main(['serve', '--port', '0', '--stop-seconds', '1']))"
        )
        with started("-c", code) as (child, url):
            with ThreadPoolExecutor() as pool:
                waiting = [
                    pool.submit(draw, url, {"prompt": "a", "stream": stream})
                    for stream in (False, True)
                ]
                assert child.stderr is not None
                assert {"n=1" in child.stderr.readline() for _ in waiting} == {True}
                child.send_signal(signal.SIGTERM)
                plain, stream = (each.result(30) for each in waiting)
            _, error = child.communicate(timeout=60)
        assert plain.status_code == 503
        assert plain.json()["error"]["code"] == "server_stopping"
        assert stream.text.startswith("event: error\ndata: ")
        assert '"server_stopping"' in stream.text
        assert child.returncode == 0
        assert "Traceback" not in error


def draw(url: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{url}/v1/images/generations", json=body, timeout=30)
