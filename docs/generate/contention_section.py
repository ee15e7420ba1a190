"""The section of docs/fidelity.md about contention: what is fitted, and what it changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from weft.machine import Machine, load
from weft.plan.concurrent import Concurrent
from weft.plan.tasks import Copy
from weft.schedule import Schedule
from weft.select.heuristic import choose
from weft.simulate import run
from weft.simulate.cost import collective, gemm
from weft.simulate.cost.fidelity import Fidelity
from weft.strategy import Strategy
from weft.study.c3 import simulated
from weft.study.c3.findings import Study
from weft.study.contention_fit import HALVES, LARGEST, Try, attempts
from weft.study.exploration import Scenario, explore
from weft.study.ficco import FiccoEvaluation
from weft.study.scenarios import Shape

BEFORE = {
    "FiCCO mi300x, largest speedup": "1.77x",
    "FiCCO mi300x, largest ideal speedup": "1.83x",
    "ConCCL mi300x, concurrent": "12 %",
    "ConCCL mi300x, prioritized": "43 %",
    "ConCCL mi300x, partitioned": "36 %",
    "ConCCL mi300x, prioritized+partitioned": "43 %",
    "ConCCL mi300x, dma": "67 %",
    "ConCCL mi300x, dma+trimmed": "71 %",
    "ConCCL mi300x, largest speedup of dma+trimmed": "1.79x",
    "GEMM h100 bfloat16, held out": "6.7 %",
    "GEMM b200 bfloat16": "9.3 %",
    "GEMM mi300x bfloat16": "16.2 %",
    "GEMM mi300x int8": "6.8 %",
    "NCCL 8 x b200 all_gather": "30.6 %",
    "NCCL 8 x b200 all_reduce": "17.8 %",
    "NCCL 8 x b200 all_to_all": "43.9 %",
    "NCCL 8 x b200 reduce_scatter": "25.7 %",
    "compute-bound GEMM mi300x without 32 units": "14.3 %",
    "compute-bound GEMM mi300x without 64 units": "29.5 %",
}
"""What the same command printed before contention was one model."""

SHAPES = ((1024, 8192, 8192), (4096, 28672, 8192), (16384, 28672, 8192), (131072, 16384, 16384))
"""M, N and K whose schedules are compared with and without capture."""

WORLD = 8
_UNFUSED = Schedule.parse("hetero-unfused-1d@dma")
_LAUNCHES = Shape(16384, 28672, 8192, dtype="bfloat16")


def section(found: Fidelity, story: FiccoEvaluation) -> str:
    """Simulates what is compared and writes the section."""
    machine, h100, mi355x = load(simulated.PUBLISHED_ON), load("h100"), load("mi355x")
    study = simulated.study(machine)
    tried = attempts(machine)
    concurrent, short = study.mean("concurrent"), _short(machine)
    eager, graph = (_one(m, _LAUNCHES) for m in (machine, machine.captured()))
    captured = [_captured(machine, *sizes) for sizes in SHAPES]
    text = Path(__file__).with_suffix(".md").read_text("utf-8")
    return text.format(
        interference=machine.links.interference,
        traffic=machine.cores.memory_bytes_per_byte,
        h100=h100.links.interference,
        b200=load("b200").links.interference,
        tried="\n".join(map(_tried, tried)),
        ladder_names=", ".join(study.published),
        ladder_published=", ".join(f"{value:.0f}" for value in study.published.values()),
        dma_alone=_where(tried, lambda one: one.mean("dma"), study.published["dma"]),
        ficco_alone=_where(tried, lambda one: max(one.largest.values()), LARGEST),
        dma_over=study.mean("dma").percent_of_ideal - study.published["dma"],
        ficco_under=LARGEST - story.top.best.speedup,
        before_after=_before_after(found, story, study),
        switch=", ".join(f"{1e3 * _beside(h100, share):.2f} ms" for share in (0.0, 0.1, 0.3)),
        concurrent=concurrent.percent_of_ideal,
        concurrent_speedup=concurrent.speedup,
        cliff=_without(mi355x, 8),
        tile="{} x {}".format(*gemm(h100, 8192, 8192, 8192).tile),
        total=mi355x.links.total_bandwidth / 1e9,
        enough=1e6 * short[0],
        by_bytes=1e6 * short[1],
        short=1e6 * short[2],
        eager_launch=1e3 * eager.outcome(_UNFUSED).losses.launch,
        captured_launch=1e3 * graph.outcome(_UNFUSED).losses.launch,
        winners=_winners(captured),
        captured="\n".join(line for line, _ in captured),
    )


def _tried(one: Try) -> str:
    held = HALVES[1]
    ladder = ", ".join(f"{value:.0f}" for value in one.ladder[held].values())
    misses = " | ".join(f"{one.miss(half):.1f}" for half in HALVES)
    largest = one.largest[held]
    return f"| {one.interference:g} | {one.traffic:g} | {misses} | {ladder} | {largest:.2f}x |"


def _where(tried: Sequence[Try], value: Callable[[Try], float], wanted: float) -> float:
    """The interference at which a value would be as published, between two that were tried."""
    traffic = tried[0].traffic
    points = [(one.interference, value(one)) for one in tried if one.traffic == traffic]
    for (low, above), (high, below) in pairwise(points):
        if above >= wanted >= below:
            return low + (high - low) * (above - wanted) / (above - below)
    raise AssertionError("what was published is outside of what was tried")


def _before_after(found: Fidelity, story: FiccoEvaluation, study: Study) -> str:
    now: dict[str, tuple[str, str]] = {
        "FiCCO mi300x, largest speedup": ("1.6x", f"{story.top.best.speedup:.2f}x"),
        "FiCCO mi300x, largest ideal speedup": ("1.7x", f"{story.largest_ideal:.2f}x"),
    }
    for mean in study.means():
        known = f"{study.published[mean.name]:.0f} %"
        now[f"ConCCL mi300x, {mean.name}"] = (known, f"{mean.percent_of_ideal:.0f} %")
    most = study.mean("dma+trimmed").most
    now["ConCCL mi300x, largest speedup of dma+trimmed"] = ("1.67x", f"{most:.2f}x")
    for summary in found.summaries:
        if summary.measure == "mean error, all rows":
            now[summary.what] = ("mean error", f"{100 * summary.value:.1f} %")
        elif summary.measure == "worst error, 1 MiB up":
            now[summary.what] = ("worst error", f"{100 * summary.value:.1f} %")
    for row in found.rows:
        if row.what.startswith("compute-bound"):
            name = f"compute-bound GEMM mi300x without {row.size} units"
            now[name] = (f"{100 * row.reference:.0f} %", f"{100 * row.model:.1f} %")
    lines = []
    for name, before in BEFORE.items():
        known, value = now[name]
        lines.append(f"| {name} | {known} | {before} | {value} |")
    return "\n".join(lines)


def _beside(machine: Machine, interference: float) -> float:
    """Seconds of an all-gather by cores that is launched ahead of a long GEMM."""
    tried = replace(machine, links=replace(machine.links, interference=interference))
    work = Concurrent.of((8192, 8192, 65536), "all_gather", 1 << 29, WORLD, "bfloat16")
    pieces = run(work.lower(Strategy.of("prioritized")), tried).pieces
    return max(piece.end for piece in pieces if isinstance(piece.task, Copy))


def _without(machine: Machine, units: int) -> float:
    """How many times as long 4096^3 takes without so many units."""
    left = machine.compute.units - units
    whole = gemm(machine, 4096, 4096, 4096).seconds
    return gemm(machine, 4096, 4096, 4096, units=left).seconds / whole


def _short(machine: Machine) -> tuple[float, float, float]:
    """Seconds of an all-gather of 1 MiB with all units it needs, with the bytes of a quarter of
    them, and with a quarter of them."""
    total, needed = 1 << 20, machine.cores.all_gather_units
    enough = collective(machine, "all_gather", total, WORLD)
    short = collective(machine, "all_gather", total, WORLD, units=needed // 4)
    calm = replace(
        machine,
        cores=replace(
            machine.cores,
            protocols=tuple(replace(p, peer_latency=0.0) for p in machine.cores.protocols),
        ),
    )
    bytes_alone = collective(calm, "all_gather", total, WORLD, units=needed // 4)
    return enough, bytes_alone + enough - collective(calm, "all_gather", total, WORLD), short


def _one(machine: Machine, shape: Shape) -> Scenario:
    return explore(machine, "all_gather_matmul", [shape], WORLD).scenarios[0]


def _winners(captured: Sequence[tuple[str, bool]]) -> str:
    changed = sum(not same for _, same in captured)
    if not changed:
        return "In none of the sizes below does another schedule win."
    return f"In {changed} of the sizes below another schedule wins."


def _captured(machine: Machine, m: int, n: int, k: int) -> tuple[str, bool]:
    """A line of the table, and whether the same schedule wins with and without capture."""
    shape = Shape(m, n, k, dtype="bfloat16")
    graph = machine.captured()
    cells, winners = [], set()
    for there in (machine, graph):
        scenario = _one(there, shape)
        best = scenario.best
        winners.add(best.schedule)
        cells.append(f"{best.schedule}, {1e3 * best.seconds:.3f} ms ({best.speedup:.2f}x)")
        if there is graph:
            operation: Any = scenario.operation
            chosen = choose(graph, operation).schedule
            seconds = run(operation.lower(chosen), graph).seconds
            cells.append(f"{chosen}, {1e3 * seconds:.3f} ms")
    return f"| {m} x {n} x {k} | {' | '.join(cells)} |", len(winners) == 1
