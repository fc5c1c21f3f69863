"""What `bishop serve` refuses before it loads anything, and what it warns of."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from cli import main
from serving.config import ServerConfig
from serving.keys import load
from serving.run import announce, listen
from tests.fakes import FakeService


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--api-keys", "nothing.yaml"], "cannot read nothing.yaml"),
        (["--api-keys", "bad.yaml"], "did you mean 'name'"),
        (["--database", "mysql://x/y"], "postgresql://"),
        (["--database", "postgresql://nobody@127.0.0.1:9/none"], "job database"),
        (["--storage", "carrier-pigeon://loft"], "carrier-pigeon"),
        (["--data", "taken"], "job database"),
        (["--data", "/proc/nothing"], "job"),
        (["--lease-seconds", "0"], "lease_seconds"),
        (["--request-seconds", "0"], "request_seconds"),
        (["--log-format", "xml"], "--log-format"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str],
    part: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text("keys: [{nam: a}]")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "jobs.sqlite").write_bytes(b"a letter, no database" * 200)
    assert main(["serve", "--port", "0", "--model", "tiny", *words]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert part in told


def test_an_open_server_without_keys_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    local = ServerConfig(port=0)
    keys = load(None, {"BISHOP_API_KEYS": "sk-12345678"})
    with listen(local) as claimed:
        for config, warned in (
            (local, False),
            (replace(local, host="0.0.0.0"), True),
            (replace(local, host="0.0.0.0", keys=keys), False),
        ):
            caplog.clear()
            announce(FakeService(), config, claimed)
            levels = [record.levelname for record in caplog.records]
            assert ("WARNING" in levels) == warned
