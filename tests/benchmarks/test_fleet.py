"""The simulated fleet: it loses nothing, and does what queueing says."""

from pathlib import Path

import pytest
import simpy

from benchmarks import simulate_fleet
from benchmarks.fleet import inputs as given
from benchmarks.fleet import measure
from benchmarks.fleet.inputs import Inputs
from benchmarks.fleet.simulation import Fleet
from benchmarks.fleet.stations import Gpu, Station


def small(**changes: float) -> Inputs:
    figures = {"front_end_ms": 2.0, "line_ms": 2.0, "transaction_ms": 1.0}
    size = {"gpus": 8, "front_ends": 4, "images_per_second": 60.0}
    return given.load(**figures).scaled(**(size | changes))


@pytest.mark.parametrize("seed", range(3))
def test_every_image_ends_once_whatever_fails(seed: int) -> None:
    broken = small(gpu_hours=0.004, front_end_hours=0.004, restart_seconds=2.0, lease_seconds=2.0)
    outcome = Fleet(broken, seed).run(2, 20, drain=120)
    assert outcome.gpu_failures > 5 and outcome.front_end_failures > 2
    assert outcome.redrawn > 0
    assert outcome.ended == outcome.begun
    assert outcome.ended_twice == 0


def test_without_failures_nothing_is_drawn_twice() -> None:
    outcome = Fleet(small(), failures=False).run(2, 10, drain=30)
    assert outcome.ended == outcome.begun > 500
    assert outcome.redrawn == outcome.gpu_failures == 0


def test_the_same_seed_gives_the_same_run() -> None:
    first, again = (Fleet(small(), seed=5).run(1, 5).latencies for _ in range(2))
    assert first == again


def test_more_gpus_are_less_busy_and_no_slower() -> None:
    one, two = (simulate_fleet.simulate("", small(gpus=gpus), 10.0) for gpus in (8, 16))
    assert two["gpu_utilisation"] == pytest.approx(one["gpu_utilisation"] / 2, rel=0.1)
    assert two["p50_seconds"] <= one["p50_seconds"]


def test_what_is_too_small_saturates_first() -> None:
    row = simulate_fleet.simulate("", small(front_end_ms=120.0, line_ms=120.0), 10.0)
    assert row["first_to_saturate"] == "front_end"
    assert row["done_images_per_second"] < 0.8 * row["offered_images_per_second"]


def test_a_scaled_fleet_is_as_busy() -> None:
    whole = small(gpus=40, front_ends=20, images_per_second=400.0)
    rows = [
        simulate_fleet.simulate("", simulate_fleet.scaled(whole, scale), 10.0)
        for scale in (1.0, 0.2)
    ]
    for part in ("gpu", "front_end", "database"):
        first, second = (row[f"{part}_utilisation"] for row in rows)
        assert second == pytest.approx(first, rel=0.15)


def test_a_station_serves_in_order() -> None:
    env = simpy.Environment()
    station, ends = Station(env, 2), []

    def customer() -> object:
        yield station.serve(1.0)
        ends.append(env.now)

    for _ in range(5):
        env.process(customer())
    env.run()
    assert ends == [1, 1, 2, 2, 3]
    assert station.utilisation(3) == pytest.approx(5 / 6)


def test_pictures_of_a_gpu_share_its_steps() -> None:
    env, ends = simpy.Environment(), []
    gpu = Gpu(env, lambda images: images, 10, lambda gpu, image: ends.append((image, env.now)))
    gpu.add("first")
    env.run(5)  # five steps of one second
    gpu.add("second")
    env.run()
    # Five more steps of two seconds end the first; five of one second are left of the second.
    assert ends == [("first", 15), ("second", 20)]


def test_inputs_name_their_sources_and_refuse_strangers(tmp_path: Path) -> None:
    assert all(each["source"] for each in given.entries().values())
    path = tmp_path / "inputs.yaml"
    path.write_text("fleet: {gpu: {value: 1, unit: '', source: ''}}")
    with pytest.raises(ValueError, match="unknown inputs gpu"):
        given.load(path)


def test_a_line_costs_a_claim_a_look_and_an_end() -> None:
    found = measure.transactions(lines=20)
    assert 2 <= found["line_transactions"] <= 4
    assert found["transaction_ms"] > 0
