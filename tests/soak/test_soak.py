"""Short versions of the soaks, with the preset `tiny`."""

from tests.soak import kills, load


def test_no_kill_loses_or_doubles_a_line() -> None:
    slow = ["--server-flag=--batch-lines=4", "--server-flag=--max-images=2"]
    outcome = kills.run(["--lines=60", "--kills=3", "--compare=20", *slow])
    assert outcome.wrong == 0, outcome
    assert outcome.compared == 20


def test_under_load_nothing_is_lost_or_mixed_up() -> None:
    outcome = load.run(["--clients=24", "--seconds=6"])
    assert outcome.wrong == 0, outcome
    assert min(outcome.answers[kind] for kind in load.KINDS) > 0, outcome
    assert outcome.health_samples > 10
