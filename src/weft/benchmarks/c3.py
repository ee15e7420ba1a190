"""Concurrent compute and communication (C3): measured here on a balanced link, simulated on MI300X,
and the slowdown of GEMMs with fewer compute units."""

from __future__ import annotations

from weft.benchmarks import Check, Result, part
from weft.machine import load, measurements
from weft.measure.launch import Report
from weft.study.c3 import measured, simulated
from weft.study.c3.findings import C3Scenario, Study

REPEAT = 25
SHAPES = ("cb",)
MULTIPLES = ("balanced",)
NEAR = 5.0
"""The largest difference between a simulated and a published mean, in points."""
NEAR_UNITS = 4.0
"""The same for the slowdown of GEMMs with fewer compute units."""

HEADERS = ("where", "strategy", "of ideal %", "published %", "speedup", "GEMM", "collective")

Row = list[str | float | int | None]


def run(report: Report) -> Result:
    """2 ranks here, with a collective as long as the GEMM; 30 scenarios simulated on MI300X."""
    here = measured.measure(
        measured.host_cases(SHAPES, MULTIPLES), repeat=REPEAT, report=part(report, 0, 2)
    )
    there = simulated.study(load(simulated.PUBLISHED_ON), report=part(report, 1, 2))
    rows: list[Row] = []
    checks: list[Check] = []
    for scenario in here.scenarios:
        rows += _measured(scenario)
        checks += _here(scenario)
    rows += _simulated(there)
    return Result(HEADERS, rows, [*checks, *_there(there), *_units(there)])


def _measured(scenario: C3Scenario) -> list[Row]:
    return [
        [
            f"here, {scenario.case.label}",
            name,
            round(outcome.percent_of_ideal),
            None,
            f"{outcome.speedup:.2f}x",
            f"{outcome.gemm_slowdown:.2f}x",
            f"{outcome.collective_slowdown:.2f}x",
        ]
        for name, outcome in scenario.outcomes.items()
    ]


def _simulated(study: Study) -> list[Row]:
    return [
        [
            f"{study.machine}, mean of {len(study.scenarios)}",
            mean.name,
            round(mean.percent_of_ideal),
            round(study.published[mean.name]),
            f"{mean.speedup:.2f}x",
            f"{mean.gemm_slowdown:.2f}x",
            f"{mean.collective_slowdown:.2f}x",
        ]
        for mean in study.means()
    ]


def _here(scenario: C3Scenario) -> list[Check]:
    dma, concurrent = scenario.outcomes["dma"], scenario.outcomes["concurrent"]
    name = f"here, {scenario.case.label}"
    return [
        Check(f"{name}: dma % of ideal", dma.percent_of_ideal, ">= 90"),
        Check(
            f"{name}: dma / twice concurrent's share of ideal",
            dma.percent_of_ideal / max(1.0, 2.0 * concurrent.percent_of_ideal),
            ">= 1",
        ),
        Check(f"{name}: GEMM under dma / alone", dma.gemm_slowdown, "<= 1.05"),
    ]


def _there(study: Study) -> list[Check]:
    """Compares every simulated mean with the published one."""
    checks = []
    for mean in study.means():
        name = f"{study.machine}: {mean.name} % of ideal"
        known = study.published[mean.name]
        checks.append(Check(name, mean.percent_of_ideal, f">= {known - NEAR:g}"))
        checks.append(Check(name, mean.percent_of_ideal, f"<= {known + NEAR:g}"))
    return checks


def _units(study: Study) -> list[Check]:
    """The slowdown of the compute-bound GEMMs of the scenarios with fewer compute units."""
    sweep = study.units
    assert sweep is not None
    slower = dict(zip(sweep.taken, sweep.gemms["compute"], strict=True))
    checks = []
    for line in measurements("cu_loss_mi300x"):
        if line["bound"] != "compute":
            continue
        taken, known = int(line["units_taken"]), float(line["slower_percent"])
        value = 100.0 * (slower[taken] - 1.0)
        name = f"{study.machine}: compute-bound GEMMs without {taken} units, % slower"
        checks.append(Check(name, value, f">= {known - NEAR_UNITS:g}"))
        checks.append(Check(name, value, f"<= {known + NEAR_UNITS:g}"))
    return checks
