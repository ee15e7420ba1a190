"""How steadily overlap reaches the possible gain: every operator under `adaptive@dma`, and
independent work under `dma`, on a balanced link, in ten runs with new processes each."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from weft.benchmarks import Check, Result, part
from weft.benchmarks.operators import NAMES, QUICK_NAMES, QUICK_SHAPE, WORLD, K, M, N
from weft.errors import keeping
from weft.measure.launch import Report
from weft.measure.link_spec import LinkSpec
from weft.measure.measurement import measure
from weft.operation import find
from weft.schedule import Schedule
from weft.study.c3 import measured

SCHEDULE, STRATEGY = "adaptive@dma", "dma"
RUNS = 10
REPEAT, REPEAT_BESIDE = 7, 15
QUICK_RUNS, QUICK_REPEAT = 2, 3

HEADERS = ("what", "of ideal %", "quartiles", "lowest", "highest", "time / ideal")


@dataclass(frozen=True)
class SteadyRun:
    """What one run reached. ratio: its time over the ideal, the longer of compute alone and
    communication alone."""

    percent: float
    ratio: float


def run(report: Report) -> Result:
    """Five operators and two collectives beside a GEMM on 2 ranks, fp32. The runs of all of them
    take turns."""
    cases = measured.host_cases(("cb",), ("balanced",))
    found: dict[str, list[SteadyRun]] = {}
    with keeping(lambda: _result(found) if found else None):
        for number in range(RUNS):
            progress = part(report, number, RUNS)
            for place, name in enumerate(NAMES):
                one = part(progress, place, len(NAMES) + 1)
                found.setdefault(name, []).append(_operator(name, (M, N, K), REPEAT, one))
            beside = part(progress, len(NAMES), len(NAMES) + 1)
            for name, reached in _beside(cases, beside).items():
                found.setdefault(name, []).append(reached)
    return _result(found)


def quick(report: Report) -> Result:
    """Two operators of a small shape, with few runs and rounds."""
    found: dict[str, list[SteadyRun]] = {name: [] for name in QUICK_NAMES}
    for number in range(QUICK_RUNS):
        progress = part(report, number, QUICK_RUNS)
        for place, name in enumerate(QUICK_NAMES):
            one = part(progress, place, len(QUICK_NAMES))
            found[name].append(_operator(name, QUICK_SHAPE, QUICK_REPEAT, one))
    return _result(found)


def _operator(name: str, shape: tuple[int, int, int], repeat: int, report: Report) -> SteadyRun:
    operation, link = find(name).of(*shape, WORLD), LinkSpec.parse("balanced")
    result = measure(operation, link, [Schedule.parse(SCHEDULE)], repeat=repeat, report=report)
    arm = result.arm(SCHEDULE)
    return SteadyRun(arm.percent_of_ideal, arm.seconds / result.ideal)


def _beside(cases: Sequence[measured.HostCase], report: Report) -> dict[str, SteadyRun]:
    study = measured.measure(
        cases, world=WORLD, strategies=(STRATEGY,), repeat=REPEAT_BESIDE, report=report
    )
    found = {}
    for scenario in study.scenarios:
        outcome = scenario.outcomes[STRATEGY]
        reached = SteadyRun(outcome.percent_of_ideal, outcome.seconds / scenario.ideal)
        found[f"GEMM beside {scenario.case.collective}"] = reached
    return found


def _result(found: dict[str, list[SteadyRun]]) -> Result:
    rows: list[list[str | float]] = []
    checks = []
    for name, runs in found.items():
        percents = [run.percent for run in runs]
        middle = statistics.median(percents)
        low, high = _quartiles(percents)
        ratio = statistics.median(run.ratio for run in runs)
        rows.append(
            [
                *(name, round(middle), f"{low:.0f} to {high:.0f}"),
                *(round(min(percents)), round(max(percents)), f"{ratio:.3f}x"),
            ]
        )
        way = SCHEDULE if name in NAMES else STRATEGY
        checks.append(Check(f"{name}: {way} % of ideal, median of runs", middle, ">= 90"))
    return Result(HEADERS, rows, checks)


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high
