"""Operators between machines, on emulated hosts (network namespaces) with paced links.

Measures how much of the ideal overlap is reached, relative to gloo's collective followed by the
matmul, on a link that takes as long as compute; whether any number of rows is slower than that; and
what two-level plans gain on machines with several ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from weft.benchmarks import Check, Result, part
from weft.fabric import Link, of
from weft.fabric.group.several_machines import SeveralMachines
from weft.fabric.processes import ProcessFabric
from weft.measure.arms import Arms, arms_of
from weft.measure.hosts import Hosts, Wire, pace_own, together
from weft.measure.launch import Report, launch
from weft.measure.measurement import WARM_UP, percent_over_rounds, timed
from weft.operation import find
from weft.ops.all_gather_matmul import all_gather_matmul
from weft.ops.matmul_reduce_scatter import matmul_reduce_scatter
from weft.run.record import record
from weft.schedule import Schedule

NAMES = ("all_gather_matmul", "matmul_reduce_scatter", "all_to_all_matmul")
M, N, K = 2048, 1024, 2048
ROWS = (1, 4, 16, 64, 256, 1024, 4096)
SCHEDULES = ("serial@dma", "shard-p2p@dma", "hetero-unfused-1d@dma", "adaptive@dma")
AUTO, GLOO = "auto", "gloo + mm"
OPERATORS: dict[str, Callable[..., Any]] = {
    "all_gather_matmul": all_gather_matmul,
    "matmul_reduce_scatter": matmul_reduce_scatter,
}
"""The operators with two-level plans."""
INSIDE = 4.0
"""The bandwidth between ranks of a machine, relative to the network."""
REPEAT, REPEAT_SWEEP = 11, 9

HEADERS = ("operator", "case", "arm", "ms", "speedup", "of ideal %", "hidden %")


def run(report: Report) -> Result:
    """2 hosts with one rank each, then 2 hosts with 2 ranks each; fp32."""
    rows: list[list[str | float]] = []
    checks: list[Check] = []
    parts = 2 * len(NAMES) + len(OPERATORS)
    with Hosts(2) as hosts:
        for number, name in enumerate(NAMES):
            progress = part(report, 2 * number, parts)
            found = launch(2, _balanced, name, hosts=hosts, report=progress)[0]
            rows += _balanced_rows(name, found)
            reached, hidden = found["of ideal"], found["hidden"]
            checks.append(Check(f"{name} balanced: {AUTO} % of ideal", reached, ">= 80"))
            checks.append(Check(f"{name} balanced: % of bytes under way hidden", hidden, ">= 80"))
            progress = part(report, 2 * number + 1, parts)
            swept = launch(2, _sweep, name, found["rate"], hosts=hosts, report=progress)[0]
            for m, times in swept.items():
                rows += [
                    [name, f"M {m}", arm, _ms(seconds), f"{times[GLOO] / seconds:.2f}x", "", ""]
                    for arm, seconds in times.items()
                ]
            slowest = max(swept, key=lambda m: swept[m][AUTO] / swept[m][GLOO])
            ratio = swept[slowest][AUTO] / swept[slowest][GLOO]
            case = f"{name}, worst of M {ROWS[0]} to {ROWS[-1]} ({slowest}): {AUTO} / {GLOO}"
            checks.append(Check(case, ratio, "<= 1.0"))
        for number, name in enumerate(OPERATORS):
            progress = part(report, 2 * len(NAMES) + number, parts)
            times = launch(4, _two_levels, name, hosts=hosts, report=progress)[0]
            gain = times["flat"] / times["two levels"]
            rows += [
                [name, "2 hosts x 2", arm, _ms(seconds), f"{times['flat'] / seconds:.2f}x", "", ""]
                for arm, seconds in times.items()
            ]
            checks.append(Check(f"{name} 2 x 2: flat / two levels", gain, ">= 1.3"))
    return Result(HEADERS, rows, checks)


def _balanced(report: Report, name: str) -> dict[str, Any]:
    """All arms on a link on which communication takes as long as compute."""
    operation = find(name).of(M, N, K, 2)
    arms = arms_of(operation, of(None))
    report(0.0, f"{name}: compute alone")
    rate = operation.num_bytes(0, 1) / _slowest(arms.compute)
    pace_own(Wire(rate))
    actions = {
        "compute": arms.compute,
        "communication": arms.communicate,
        GLOO: arms.plain,
        AUTO: _auto(arms),
        **{schedule: arms.call(Schedule.parse(schedule)) for schedule in SCHEDULES},
    }
    samples = _in_turns(actions, REPEAT, report)
    with record() as recording:
        dist.barrier()
        _auto(arms)()
    timeline = recording.gather()[0]
    hidden = timeline.overlap_seconds(0) / timeline.communication_seconds(0)
    reached = {arm: percent_over_rounds(samples, arm, GLOO) for arm in (AUTO, *SCHEDULES)}
    return {
        "rate": rate,
        "times": _medians(samples),
        "reached": reached,
        "of ideal": reached[AUTO],
        "hidden": 100.0 * hidden,
    }


def _sweep(report: Report, name: str, rate: float) -> dict[int, dict[str, float]]:
    """auto against gloo + mm, from few rows to many, on the same link."""
    pace_own(Wire(rate))
    found = {}
    for number, m in enumerate(ROWS):
        # gloo gathers only shards of equal size, so m is the number of rows per rank there.
        total = 2 * m if name == "all_gather_matmul" else m
        arms = arms_of(find(name).of(total, N, K, 2), of(None))
        actions = {GLOO: arms.plain, AUTO: _auto(arms)}
        samples = _in_turns(actions, REPEAT_SWEEP, part(report, number, len(ROWS)))
        found[m] = _medians(samples)
    return found


def _two_levels(report: Report, name: str) -> dict[str, float]:
    """adaptive with flat and with two-level plans. Links inside a machine are `INSIDE` times as
    fast as the network, on which the necessary bytes take as long as compute."""
    operation = find(name).of(M // 2, N // 2, K, 4)
    world, everyone = dist.group.WORLD, dist.new_group(list(range(4)))
    fabrics = {"flat": of(everyone), "two levels": of(world)}
    flat = fabrics["flat"]
    assert isinstance(flat, ProcessFabric)
    assert isinstance(flat.reach, SeveralMachines)
    flat.reach.levels = 1
    random = torch.Generator().manual_seed(dist.get_rank())
    gathers = name == "all_gather_matmul"
    x = torch.randn(operation.rows[0] if gathers else operation.m, K, generator=random)
    w, whole = torch.randn(K, N // 2, generator=random), torch.randn(operation.m, K)
    operator = OPERATORS[name]
    rate = 2 * operation.num_bytes(0, 1) / _slowest(lambda: torch.mm(whole, w))
    if dist.get_rank() % 2 == 0:
        pace_own(Wire(rate))
    for fabric in fabrics.values():
        fabric.set_link(Link(INSIDE * rate))
    actions: dict[str, Callable[[], Any]] = {
        "flat": lambda: operator(x, w, schedule="adaptive@dma", group=everyone),
        "two levels": lambda: operator(x, w, schedule="adaptive@dma", group=world),
    }
    return _medians(_in_turns(actions, REPEAT, report))


def _in_turns(
    arms: dict[str, Callable[[], Any]], repeat: int, report: Report
) -> dict[str, list[float]]:
    """The seconds of every arm in every round, of the slowest rank. Collective.

    A round runs each arm once, in a random order that is the same on all ranks, so that no arm
    always inherits the caches and connections of the same other arm.
    """
    names, random = list(arms), Random(1)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-WARM_UP, repeat):
        for name in random.sample(names, len(names)):
            seconds = together(arms[name])
            if number >= 0:
                samples[name].append(seconds)
        report((number + WARM_UP + 1) / (repeat + WARM_UP), f"round {max(number, 0) + 1}")
    own = torch.tensor([samples[name] for name in names], dtype=torch.float64)
    dist.all_reduce(own, dist.ReduceOp.MAX)
    return {name: row.tolist() for name, row in zip(names, own, strict=True)}


def _medians(samples: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in samples.items()}


def _auto(arms: Arms) -> Callable[[], Any]:
    return arms.call(AUTO)


def _slowest(compute: Callable[[], Any]) -> float:
    seconds = torch.tensor(statistics.median(timed(compute) for _ in range(7)), dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def _balanced_rows(name: str, found: dict[str, Any]) -> list[list[str | float]]:
    times, reached = found["times"], found["reached"]
    rows: list[list[str | float]] = []
    for arm, seconds in times.items():
        ideal = round(reached[arm]) if arm in reached else ""
        hidden = round(found["hidden"]) if arm == AUTO else ""
        speedup = f"{times[GLOO] / seconds:.2f}x"
        rows.append([name, "balanced", arm, _ms(seconds), speedup, ideal, hidden])
    return rows


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)
