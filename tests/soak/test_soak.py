"""Short versions of the soaks, with the preset `tiny`."""

import importlib.util

import pytest

from tests.soak import kills, load, replicas


def test_no_kill_loses_or_doubles_a_line() -> None:
    slow = ["--server-flag=--batch-lines=4", "--server-flag=--max-images=2"]
    outcome = kills.run(["--lines=60", "--kills=3", "--compare=20", *slow])
    assert outcome.wrong == 0, outcome
    assert outcome.compared == 20


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra `ray`")
def test_no_killed_replica_loses_or_doubles_a_picture() -> None:
    slow = ["--server-flag=--max-images=4", "--server-flag=--cache-mib=64"]
    outcome = replicas.run(["--lines=100", "--kills=4", "--compare=10", "--jitter=0.1", *slow])
    assert outcome.wrong == 0, outcome
    assert outcome.restarts >= 1, outcome
    assert outcome.compared == 20


def test_under_load_nothing_is_lost_or_mixed_up() -> None:
    outcome = load.run(["--clients=24", "--seconds=6"])
    assert outcome.wrong == 0, outcome
    assert min(outcome.answers[kind] for kind in load.KINDS) > 0, outcome
    assert outcome.health_samples > 10
