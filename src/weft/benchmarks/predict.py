"""How well the calibrated machine predicts this host, over shapes that calibration did not use."""

from __future__ import annotations

import json
import statistics
from typing import NamedTuple

from weft.benchmarks import Check, Result, part
from weft.fabric.link import Topology
from weft.machine import load
from weft.measure.calibration import YARDSTICK
from weft.measure.launch import Report
from weft.measure.link_spec import LinkSpec
from weft.measure.measurement import measure
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.schedule import Schedule
from weft.study.prediction import Prediction, keep_results, predict


class LinkedShape(NamedTuple):
    """A shape on a link."""

    m: int
    n: int
    k: int
    world: int
    link: str
    topology: Topology = "mesh"

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}, {self.world} ranks, {self.link} {self.topology}"


CASES = (  # calibration measures none of these M, N and K
    LinkedShape(768, 768, 1536, 2, "balanced"),
    LinkedShape(1536, 384, 768, 2, "0.5x"),
    LinkedShape(640, 1280, 640, 2, "2x"),
    LinkedShape(384, 1536, 1920, 2, "balanced"),
    LinkedShape(200, 3072, 768, 2, "balanced"),
    LinkedShape(96, 1536, 1536, 2, "2x"),
    LinkedShape(48, 768, 3072, 2, "0.5x"),
    LinkedShape(1920, 320, 640, 2, "memory"),
    LinkedShape(720, 720, 2880, 2, "0.05GB/s"),
    LinkedShape(960, 480, 480, 2, "4x"),
    LinkedShape(768, 384, 1536, 4, "balanced"),
    LinkedShape(576, 768, 960, 4, "0.5x", "switch"),
)
REPEAT = 9
MEDIAN_ERROR, CLOSE, HITS = 10.0, 5.0, 10

HEADERS = (
    "case",
    "error %",
    "worst %",
    "noise %",
    "first",
    "behind %",
    "ordered %",
    "speed",
)


def run(report: Report) -> Result:
    """Measures all schedules of 12 shapes and compares the simulation with them."""
    machine = load("cpu")
    predictions = []
    for number, case in enumerate(CASES):
        operation = AllGatherMatmul.of(case.m, case.n, case.k, case.world)
        measured = measure(
            operation,
            LinkSpec.parse(case.link, case.topology),
            Schedule.space(operation),
            repeat=REPEAT,
            yardstick=YARDSTICK[1:],
            report=part(report, number, len(CASES)),
        )
        predictions.append(predict(measured, machine))
    rows = [_row(case, p) for case, p in zip(CASES, predictions, strict=True)]
    errors = [abs(f.error_percent) for p in predictions for f in p.forecasts]
    hits = sum(p.regret_percent <= CLOSE for p in predictions)
    checks = [
        Check(
            "median error over all schedules, %", statistics.median(errors), f"<= {MEDIAN_ERROR}"
        ),
        Check("shapes whose first is within 5 % of the best", hits, f">= {HITS}"),
    ]
    result = Result(HEADERS, rows, checks)
    keep_results(json.dumps(result.to_json(), indent=2))
    return result


def _row(case: LinkedShape, p: Prediction) -> list[str | float]:
    worst = max(p.forecasts, key=lambda forecast: abs(forecast.error_percent))
    return [
        str(case),
        round(p.median_error_percent, 1),
        round(worst.error_percent, 1),
        round(p.noise_percent, 1),
        p.first.arm.name,
        round(p.regret_percent, 1),
        round(p.agreement_percent),
        round(p.speed, 2),
    ]
