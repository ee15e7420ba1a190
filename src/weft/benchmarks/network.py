"""Operators between machines, on emulated hosts (network namespaces) with paced links.

Measures how much of the ideal overlap is reached, relative to gloo's collective followed by the
matmul, on a link that takes as long as compute; whether any number of rows is slower than that; and
what two-level plans gain on machines with several ranks. Every figure is the median of five runs,
each with processes of its own, which alternate between the operators.
"""

from __future__ import annotations

import statistics
import time
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
ROWS = (1, 4, 16, 64, 256, 1024)
SCHEDULES = ("serial@dma", "hetero-unfused-1d@dma")
AUTO, GLOO = "auto", "gloo + mm"
BESIDE = "mm beside its bytes over gloo"
"""The bound on this machine: the matmul, while gloo moves as many bytes that it does not need. It
takes longer than the ideal by the processor time that the network takes from compute."""
OPERATORS: dict[str, Callable[..., Any]] = {
    "all_gather_matmul": all_gather_matmul,
    "matmul_reduce_scatter": matmul_reduce_scatter,
}
"""The operators with two-level plans."""
INSIDE = 4.0
"""The bandwidth between ranks of a machine, relative to the network."""
RUNS = 5
REPEAT, REPEAT_SWEEP, REPEAT_LEVELS = 7, 7, 5
"""Rounds of a run."""
THREADS = "processor time of the threads of the network"

HEADERS = ("operator", "case", "arm", "ms", "speedup", "of ideal %", "lowest", "highest")


def run(report: Report) -> Result:
    """2 hosts with one rank each, then 2 hosts with 2 ranks each; fp32. "Lowest" and "highest" are
    those of five runs, of the share of the ideal if there is one, otherwise of the speedup."""
    found: dict[str, list[Any]] = {name: [] for name in NAMES}
    levels: dict[str, list[dict[str, float]]] = {name: [] for name in OPERATORS}
    parts = RUNS * (len(NAMES) + len(OPERATORS))
    with Hosts(2) as hosts:
        for number in range(parts):
            turn = number % (len(NAMES) + len(OPERATORS))
            progress = part(report, number, parts)
            if turn < len(NAMES):
                name = NAMES[turn]
                found[name].append(launch(2, _one_run, name, hosts=hosts, report=progress)[0])
            else:
                name = list(OPERATORS)[turn - len(NAMES)]
                levels[name].append(launch(4, _two_levels, name, hosts=hosts, report=progress)[0])
    rows: list[list[str | float]] = []
    checks: list[Check] = []
    for name, runs in found.items():
        rows += _balanced_rows(name, [balanced for balanced, _ in runs])
        reached, hidden = (_over_runs(runs, key)[1] for key in ("of ideal", "hidden"))
        checks.append(Check(f"{name} balanced: {AUTO} % of ideal", reached, ">= 85"))
        checks.append(Check(f"{name} balanced: % of bytes under way hidden", hidden, ">= 80"))
        swept = [sweep for _, sweep in runs]
        ratios = {m: _speedups([sweep[m] for sweep in swept], GLOO, AUTO) for m in ROWS}
        for m in ROWS:
            rows += _compared(name, f"M {m}", [sweep[m] for sweep in swept], GLOO)
        slowest = min(ROWS, key=lambda m: ratios[m][1])
        case = f"{name}, worst of M {ROWS[0]} to {ROWS[-1]} ({slowest}): {AUTO} / {GLOO}"
        checks.append(Check(case, 1.0 / ratios[slowest][1], "<= 1.0"))
    for name, times in levels.items():
        rows += _compared(name, "2 hosts x 2", times, "flat")
        gain = _speedups(times, "flat", "two levels")[1]
        checks.append(Check(f"{name} 2 x 2: flat / two levels", gain, ">= 1.3"))
    return Result(HEADERS, rows, checks)


def _one_run(report: Report, name: str) -> tuple[dict[str, Any], dict[int, dict[str, float]]]:
    balanced = _balanced(part(report, 0, 2), name)
    return balanced, _sweep(part(report, 1, 2), name)


def _balanced(report: Report, name: str) -> dict[str, Any]:
    """All arms on a link on which communication takes as long as compute. The wire stays."""
    operation = find(name).of(M, N, K, 2)
    arms = arms_of(operation, of(None))
    report(0.0, f"{name}: compute alone")
    rate = operation.num_bytes(0, 1) / _slowest(arms.compute)
    pace_own(Wire(rate))
    actions = {
        "compute": arms.compute,
        "communication": arms.communicate,
        GLOO: arms.plain,
        BESIDE: _beside(arms, operation.num_bytes(0, 1)),
        AUTO: _auto(arms),
        **{schedule: arms.call(Schedule.parse(schedule)) for schedule in SCHEDULES},
    }
    samples = _in_turns(actions, REPEAT, report)
    before = _seconds_of_threads()
    with record() as recording:
        dist.barrier()
        _auto(arms)()
    threads = _seconds_of_threads() - before
    timeline = recording.gather()[0]
    hidden = timeline.overlap_seconds(0) / timeline.communication_seconds(0)
    reached = {arm: percent_over_rounds(samples, arm, GLOO) for arm in (BESIDE, AUTO, *SCHEDULES)}
    return {
        "times": {**_medians(samples), THREADS: threads},
        "reached": reached,
        "of ideal": reached[AUTO],
        "hidden": 100.0 * hidden,
    }


def _seconds_of_threads() -> float:
    """The processor time of all threads of this process but the one that computes."""
    return time.process_time() - time.thread_time()


def _sweep(report: Report, name: str) -> dict[int, dict[str, float]]:
    """auto against gloo + mm, from few rows to many, on the same link."""
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
    return _medians(_in_turns(actions, REPEAT_LEVELS, report))


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


def _beside(arms: Arms, num_bytes: int) -> Callable[[], Any]:
    peer = 1 - dist.get_rank()
    sent, received = torch.zeros(2, num_bytes, dtype=torch.uint8)

    def run() -> None:
        works = [dist.irecv(received, peer), dist.isend(sent, peer)]
        arms.compute()
        for work in works:
            assert work is not None
            work.wait()

    return run


def _auto(arms: Arms) -> Callable[[], Any]:
    return arms.call(AUTO)


def _slowest(compute: Callable[[], Any]) -> float:
    seconds = torch.tensor(statistics.median(timed(compute) for _ in range(7)), dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def _balanced_rows(name: str, runs: list[dict[str, Any]]) -> list[list[str | float]]:
    rows = _compared(name, "balanced", [found["times"] for found in runs], GLOO)
    for row in rows:
        arm = str(row[2])
        if arm in runs[0]["reached"]:
            low, middle, high = _spread([found["reached"][arm] for found in runs])
            row[5:] = [round(middle), round(low), round(high)]
        elif arm == THREADS:
            row[4], row[6:] = "", ["", ""]
    return rows


def _compared(
    name: str, case: str, runs: list[dict[str, float]], base: str
) -> list[list[str | float]]:
    """A row for every arm: its time, and its speedup over `base` in the same run."""
    rows: list[list[str | float]] = []
    for arm in runs[0]:
        ms = round(statistics.median(times[arm] for times in runs) * 1e3, 2)
        low, middle, high = (f"{ratio:.2f}x" for ratio in _speedups(runs, base, arm))
        rows.append([name, case, arm, ms, middle, "", low, high])
    return rows


def _speedups(runs: list[dict[str, float]], base: str, arm: str) -> tuple[float, float, float]:
    return _spread([times[base] / times[arm] for times in runs])


def _over_runs(runs: list[Any], key: str) -> tuple[float, float, float]:
    return _spread([balanced[key] for balanced, _ in runs])


def _spread(values: list[float]) -> tuple[float, float, float]:
    """The lowest value, the median and the highest."""
    return min(values), statistics.median(values), max(values)
