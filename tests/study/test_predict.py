"""Predictions: errors, ranks and links, from measurements made up for it and from one made here."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from host_figures import figures

from weft.fabric import Link
from weft.machine import Machine
from weft.measure.calibration import QUICK, YARDSTICK
from weft.measure.describe import describe
from weft.measure.link_spec import LinkSpec
from weft.measure.measurement import Arm, Measurement, measure
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.schedule import Schedule
from weft.simulate import run
from weft.study.prediction import at_speed, on_link, predict, speed_of
from weft.timeline import Timeline

OPERATION = AllGatherMatmul.of(512, 256, 512, 2)
NAMES = ("serial@dma", "shard-p2p@dma", "adaptive@dma")
LINK = Link(2e8)


def machine() -> Machine:
    return describe(figures())


def measured(times: dict[str, float], yardstick: float = 0.0) -> Measurement:
    arms = tuple(Arm(name, t, 1.0, 0.0, 1.0, {}, Timeline(()), (t, t)) for name, t in times.items())
    return Measurement(OPERATION, LINK, 1.0, 1.0, 1.0, arms, yardstick)


def simulated() -> dict[str, float]:
    plans = {name: OPERATION.lower(Schedule.parse(name)) for name in NAMES}
    return {name: run(plan, on_link(machine(), LINK)).seconds for name, plan in plans.items()}


def test_a_measurement_that_equals_the_simulation_has_no_error() -> None:
    found = predict(measured(simulated()), machine())
    assert found.median_error_percent == pytest.approx(0.0)
    assert found.regret_percent == 0.0
    assert found.agreement_percent == 100.0
    assert found.noise_percent == 0.0
    assert found.speed == 1.0


def test_errors_are_against_what_was_measured() -> None:
    times = simulated()
    times["serial@dma"] /= 1.5
    times["adaptive@dma"] /= 0.8
    found = {f.arm.name: f.error_percent for f in predict(measured(times), machine()).forecasts}
    assert found["serial@dma"] == pytest.approx(50.0)
    assert found["adaptive@dma"] == pytest.approx(-20.0)
    assert found["shard-p2p@dma"] == pytest.approx(0.0)


def test_ranking_the_wrong_one_first_is_regretted() -> None:
    times = simulated()
    first = min(times, key=lambda name: times[name])
    best = min(times.values())
    times[first] = 1.2 * max(times.values())
    found = predict(measured(times), machine())
    assert found.first.arm.name == first
    assert found.regret_percent == pytest.approx(100 * (times[first] / min(times.values()) - 1))
    assert found.regret_percent > 100 * (times[first] / best - 1) - 100
    assert found.agreement_percent == pytest.approx(100 / 3)


def test_the_json_has_a_prediction_for_every_schedule() -> None:
    found = predict(measured(simulated()), machine()).to_json()
    for row in found["schedules"]:
        assert row["predicted_ms"] == pytest.approx(row["median_ms"])
        assert row["error_percent"] == pytest.approx(0.0)
    assert found["prediction"]["ranked_first"] in NAMES
    json.dumps(found)


def test_timelines_come_in_pairs_the_best_first() -> None:
    times = simulated()
    titles = [t.title for t in predict(measured(times), machine()).timelines()]
    best = min(times, key=lambda name: times[name])
    assert titles[:2] == [f"{best}, measured", f"{best}, simulated"]
    assert len(titles) == 2 * len(NAMES)


def test_the_yardstick_scales_what_cores_do_and_not_the_links() -> None:
    _, m, n, k = YARDSTICK
    at_calibration = 2.0 * m * n * k / 5e10
    assert speed_of(machine(), 2 * at_calibration, 2) == pytest.approx(0.5)
    assert speed_of(machine(), 2 * at_calibration, 4) == pytest.approx(1.0)
    half = on_link(at_speed(machine(), 0.5), LINK)
    assert half.links.bandwidth == LINK.bandwidth
    assert half.compute.rate["float32"] == pytest.approx(2.5e10)
    whole = AllGatherMatmul.of(512, 256, 512, 1).lower(Schedule.parse("serial"))
    assert run(whole, half).seconds == pytest.approx(2 * run(whole, machine()).seconds)


def test_links_are_those_of_the_measurement() -> None:
    slow, fast = Link(1e7), Link(2e7)
    plan = OPERATION.lower(Schedule.parse("serial"))
    moved = OPERATION.num_bytes(0, 1)
    difference = run(plan, on_link(machine(), slow)).seconds
    difference -= run(plan, on_link(machine(), fast)).seconds
    assert difference == pytest.approx(moved / 1e7 - moved / 2e7, rel=0.01)
    late = run(plan, on_link(machine(), replace(slow, latency=0.5))).seconds
    assert late == pytest.approx(run(plan, on_link(machine(), slow)).seconds + 0.5)
    memory = run(plan, on_link(machine(), Link())).seconds
    assert memory < run(plan, on_link(machine(), fast)).seconds


def test_a_prediction_of_a_measurement_made_here() -> None:
    """A link so slow that it decides alone: then the prediction must hold on any machine. On a busy
    one for the quickest call of each schedule, which was disturbed least."""
    operation = AllGatherMatmul.of(64, 64, 256, 2)
    schedules = [Schedule.parse(name) for name in ("serial@dma", "adaptive@dma")]
    link = LinkSpec(link=Link(operation.num_bytes(0, 1) / 0.2))
    measured = measure(operation, link, schedules, repeat=3, yardstick=YARDSTICK[1:])
    quickest = tuple(replace(arm, seconds=min(arm.samples)) for arm in measured.arms)
    found = predict(replace(measured, arms=quickest), machine())
    assert found.speed > 0
    assert found.median_error_percent < 25
    for forecast in found.forecasts:
        assert forecast.timeline.seconds == pytest.approx(0.2, rel=0.25)
        lanes = set(forecast.timeline.lanes())
        assert lanes <= set(forecast.arm.timeline.lanes()) | {(0, "compute"), (1, "compute")}


def test_quick_and_full_agree_on_what_a_host_is() -> None:
    assert {p.dtype for p in QUICK.points} == {"float32", "float64", "bfloat16", "float16"}
