"""What a measurement says: ties are ties, a busy machine is named, and page and table agree."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from weft.fabric import Link
from weft.measure import busyness
from weft.measure.busyness import Company, Moment, between
from weft.measure.measurement import Arm, Measurement
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.report.run_page import run_page
from weft.report.run_report import rows_of, standing, verdict
from weft.study.prediction import Forecast, Prediction
from weft.timeline import COMPUTE, Span, Timeline

OPERATION = AllGatherMatmul.of(64, 32, 64, world=2)
CALM = Company(2, 0.05)


def arm(name: str, *samples: float, **more: str) -> Arm:
    middle = sorted(samples)[len(samples) // 2]
    timeline = Timeline((Span(0, COMPUTE, "t", "matmul", 0.0, 3 * middle),), name)
    return Arm(name, middle, 1.0 / middle, 50.0, 1.1, {"dma": 8}, timeline, samples, **more)


def measured(*arms: Arm, auto: Arm | None = None, company: Company | None = CALM) -> Measurement:
    return Measurement(OPERATION, Link(), 0.4, 0.4, 1.0, arms, auto=auto, company=company)


SERIAL = arm("serial@dma", *[1.0] * 15)
QUICK = arm("adaptive@dma", *[0.5 + 0.001 * i for i in range(15)])
NOISY = arm("hetero-fused-1d@dma", *[0.5 + 0.02 * (i % 3) - 0.01 * (i % 2) for i in range(15)])


def test_a_clear_winner_is_named_and_auto_with_it() -> None:
    auto = replace(QUICK, name="auto", chose="adaptive@dma", why="tuned here")
    found = measured(SERIAL, QUICK, auto=auto)
    assert standing(found).first == ("adaptive@dma",)
    assert verdict(found) == (
        "Use adaptive@dma: 1.97x over serial, 50 % of the possible gain; auto chooses it."
    )


def test_what_cannot_be_told_apart_is_tied() -> None:
    found = measured(SERIAL, QUICK, NOISY)
    assert set(standing(found).first) == {"adaptive@dma", "hetero-fused-1d@dma"}
    assert "is as fast within the noise" in verdict(found)


def test_serial_among_the_fastest_means_that_overlap_gains_nothing() -> None:
    found = measured(SERIAL, arm("adaptive@dma", *[1.0 + 0.1 * (-1) ** i for i in range(15)]))
    assert verdict(found).startswith("Overlap gains nothing that can be measured here")


def test_auto_that_is_slower_than_best_says_by_how_much() -> None:
    auto = arm("auto", *[0.6] * 15, chose="serial@cores")
    other = arm("serial@cores", *[0.6] * 15)
    said = verdict(measured(SERIAL, arm("adaptive@dma", *[0.5] * 15), other, auto=auto))
    assert said.endswith("auto chooses serial@cores, which is 20 % slower than best.")


@pytest.mark.parametrize("rounds", [1, 5])
def test_few_rounds_crown_nothing(rounds: int) -> None:
    found = measured(arm("serial@dma", *[1.0] * rounds), arm("adaptive@dma", *[0.5] * rounds))
    assert standing(found).first == ()
    assert "cannot tell schedules apart" in verdict(found)


def test_a_busy_machine_is_named_and_nothing_is_crowned() -> None:
    found = measured(SERIAL, QUICK, company=Company(2, 1.3))
    assert found.busy
    assert "the machine was busy: other programs used 1.3 of its 2 cores" in verdict(found)
    assert not measured(SERIAL, QUICK, company=Company(16, 1.3)).busy, "cores are left for others"
    assert not measured(SERIAL, QUICK, company=None).busy


def test_others_are_all_that_this_process_did_not_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(busyness.os, "sched_getaffinity", lambda _: {0, 1})
    found = between(Moment(10.0, 100.0, 1.0), Moment(16.0, 108.0, 3.0))
    assert found == Company(2, pytest.approx(1.0))
    assert between(None, Moment(1.0, 2.0, 0.0)) is None
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu 9 9 9 9 9 9 9 9 0 0\ncpu0 100 0 100 700 100 0 0 0 0 0\ncpu7 1 1 1 1 1 1 1 1\n"
    )
    monkeypatch.setattr(busyness, "STAT", stat)
    now = busyness.now()
    assert now is not None
    ticks = busyness.os.sysconf("SC_CLK_TCK")
    assert (now.busy, now.total) == (200 / ticks, 1000 / ticks)


def figures_of(path: Path) -> list[dict]:
    text = path.read_text("utf-8")
    found = re.findall(r'<script type="application/json" data-figure="[^"]*">(.*?)</script>', text)
    return [json.loads(one) for one in found]


def test_the_page_shows_the_medians_of_the_table_sorted_with_quartiles(tmp_path: Path) -> None:
    auto = replace(QUICK, name="auto", chose="adaptive@dma", why="tuned here")
    found = measured(SERIAL, QUICK, auto=auto)
    path = run_page(tmp_path / "page.html", found, title="t")
    bars = figures_of(path)[0]["data"][0]
    shown = sorted(float(str(row[1])) for row in rows_of(found))
    assert [round(x, 2) for x in bars["x"]] == shown
    low, high = QUICK.quartiles
    assert bars["error_x"]["array"][0] == pytest.approx(1e3 * (high - QUICK.seconds), abs=1e-3)
    assert bars["error_x"]["arrayminus"][0] == pytest.approx(1e3 * (QUICK.seconds - low), abs=1e-3)
    text = path.read_text("utf-8")
    assert "auto: adaptive@dma" in text
    assert "Each drawing is one recorded call." in text


def test_a_prediction_stands_below_its_measurement_with_the_error(tmp_path: Path) -> None:
    found = measured(SERIAL, QUICK)
    forecasts = tuple(Forecast(a, 1.1 * a.seconds, a.timeline) for a in found.arms)
    prediction = Prediction(found, None, 1.0, forecasts)  # type: ignore[arg-type]
    path = run_page(tmp_path / "page.html", found, prediction, title="t")
    measured_bars, predicted = figures_of(path)[0]["data"]
    assert len(measured_bars["x"]) == len(predicted["x"]) == 2
    assert predicted["x"] == pytest.approx([1.1 * x for x in measured_bars["x"]])
    assert all("+10 %" in text for text in predicted["text"])
