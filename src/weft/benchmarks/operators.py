"""The five operators in one table: how much of the ideal each reaches on a balanced link, and its
time at memory speed relative to its compute alone and to gloo + mm."""

from __future__ import annotations

import statistics

from weft.benchmarks import Check, Result, part
from weft.errors import keeping
from weft.fabric import of
from weft.measure.arms import arms_of
from weft.measure.launch import Report, launch
from weft.measure.link_spec import LinkSpec
from weft.measure.measurement import Measurement, interleaved, measure
from weft.operation import find
from weft.schedule import Schedule

NAMES = (
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "all_to_all_matmul",
    "matmul_all_to_all",
)
M, N, K, WORLD = 2048, 1024, 2048, 2
PACED = ("shard-p2p@dma", "hetero-unfused-1d@dma", "adaptive@dma", "adaptive:8@dma")
DIRECT = "adaptive@direct"
REPEAT = 15
QUICK_NAMES = ("all_gather_matmul", "matmul_reduce_scatter")
QUICK_SHAPE, QUICK_REPEAT = (1024, 512, 1024), 5

HEADERS = ("operator", "link", "arm", "ms", "speedup", "of ideal %")


def run(report: Report) -> Result:
    """Each operator on 2 ranks, fp32: its best schedule on a balanced link, and `direct`."""
    rows: list[list[str | float]] = []
    checks: list[Check] = []
    with keeping(lambda: Result(HEADERS, rows, checks) if rows else None):
        _measure(report, rows, checks)
    return Result(HEADERS, rows, checks)


def quick(report: Report) -> Result:
    """Two operators of a small shape on a balanced link, with few rounds."""
    rows: list[list[str | float]] = []
    checks: list[Check] = []
    for number, name in enumerate(QUICK_NAMES):
        operation = find(name).of(*QUICK_SHAPE, WORLD)
        progress = part(report, number, len(QUICK_NAMES))
        schedules = [Schedule.parse("adaptive@dma")]
        balanced = LinkSpec.parse("balanced")
        result = measure(operation, balanced, schedules, repeat=QUICK_REPEAT, report=progress)
        rows += _balanced(name, result)
        checks.append(_reached(name, result))
    return Result(HEADERS, rows, checks)


def _measure(report: Report, rows: list[list[str | float]], checks: list[Check]) -> None:
    schedules = [Schedule.parse(name) for name in PACED]
    for number, name in enumerate(NAMES):
        operation = find(name).of(M, N, K, WORLD)
        progress = part(report, 2 * number, 2 * len(NAMES))
        balanced = LinkSpec.parse("balanced")
        result = measure(operation, balanced, schedules, repeat=REPEAT, report=progress)
        rows += _balanced(name, result)
        checks.append(_reached(name, result))
        progress = part(report, 2 * number + 1, 2 * len(NAMES))
        memory = launch(WORLD, _memory_speed, name, report=progress)[0]
        rows += [[name, "memory", arm, _ms(seconds), "", ""] for arm, seconds in memory.items()]
        direct = memory[DIRECT]
        compute, gloo = direct / memory["compute"], direct / memory["gloo + mm"]
        checks.append(Check(f"{name} memory: {DIRECT} / compute", compute, "<= 1.10"))
        checks.append(Check(f"{name} memory: {DIRECT} / gloo + mm", gloo, "<= 1.0"))


def _balanced(name: str, result: Measurement) -> list[list[str | float]]:
    return [
        [
            *(name, "balanced", arm.name, _ms(arm.seconds)),
            *(f"{arm.speedup:.2f}x", round(arm.percent_of_ideal)),
        ]
        for arm in result.arms
    ]


def _reached(name: str, result: Measurement) -> Check:
    best = result.best
    return Check(f"{name} balanced: {best.name} % of ideal", best.percent_of_ideal, ">= 85")


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


def _memory_speed(report: Report, name: str) -> dict[str, float]:
    arms = arms_of(find(name).of(M, N, K, WORLD), of(None))
    actions = {
        "compute": arms.compute,
        DIRECT: arms.call(Schedule.parse(DIRECT)),
        "gloo + mm": arms.plain,
    }
    samples = interleaved(actions, REPEAT, report)
    return {arm: statistics.median(values) for arm, values in samples.items()}
