"""Measures C3 on this machine: every strategy, on scenarios that are scaled to it.

Ranks are processes with one core each. Links are paced so that the collective takes a multiple of
the GEMM (G-long, GC-equal, C-long by design). Every round runs each arm once, in rotating order:
GEMM alone (twice, half a round apart), collective alone, serial, and every strategy. Before each
arm, the GEMM runs once untimed, so that no arm inherits the caches of another. Speedups and
percents are ratios within a round. Only rounds count in which the machine kept its speed, according
to the GEMM alone. Further rounds are recorded, for the slowdowns.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.distributed as dist

from weft.errors import Unsupported
from weft.fabric import Fabric, Link, of
from weft.measure.launch import Report, launch
from weft.measure.link_spec import busiest_link
from weft.measure.measurement import interleaved, timed
from weft.operation import ranks_label
from weft.ops.concurrent import matmul_beside
from weft.plan.concurrent import COLLECTIVES
from weft.run.placement import Placement
from weft.run.record import record
from weft.strategy import Strategy
from weft.study.c3.cases import C3Case
from weft.study.c3.findings import C3Outcome, C3Scenario, Study
from weft.timeline import COMMUNICATION, Timeline, percent_of_ideal

WORLD = 2
DTYPE = "float32"
BYTES = 1 << 20
"""The bytes of the collective: few enough that its memory traffic does not matter."""
SHAPES = {"cb": (1536, 1024, 1024), "mb": (4, 8192, 4096)}
"""GEMMs of about ten milliseconds on a core, bound by arithmetic (cb) and by memory (mb)."""
MULTIPLES = {"half": 0.5, "balanced": 1.0, "twice": 2.0}
"""The time of the collective relative to the GEMM, by name."""
LADDER = (
    "concurrent",
    "prioritized",
    "partitioned:1",
    "prioritized+partitioned:1",
    "dma",
    "dma+trimmed:1",
)
REPEAT = 9
RECORDED = 11
AGAIN = "compute again"
NEAR = 1.2
"""If the GEMM alone takes more than this many times its usual time, the machine is disturbed."""
WARM_UP = 12
"""The number of runs of the GEMM alone before its link is chosen."""


@dataclass(frozen=True)
class HostCase:
    """A case, and the time of its collective on its link, as a multiple of the GEMM."""

    case: C3Case
    multiple: float


def host_cases(
    shapes: Sequence[str] = tuple(SHAPES), multiples: Sequence[str] = tuple(MULTIPLES)
) -> list[HostCase]:
    """Both GEMMs with both collectives, where the collective is shorter, equal, and longer."""
    return [
        HostCase(
            C3Case(
                f"{shape}-{name}",
                *SHAPES[shape],
                collective,
                BYTES,
                f"the collective takes {MULTIPLES[name]:g}x the GEMM",
            ),
            MULTIPLES[name],
        )
        for shape, collective, name in product(shapes, COLLECTIVES, multiples)
    ]


def measure(
    cases: Sequence[HostCase] | None = None,
    *,
    world: int = WORLD,
    strategies: Sequence[str] = LADDER,
    repeat: int = REPEAT,
    report: Report | None = None,
) -> Study:
    """Measures scenarios (default: all of `host_cases`) on ranks of this machine."""
    cases = host_cases() if cases is None else list(cases)
    if world < 2:
        raise Unsupported(f"a collective takes 2 ranks or more, not {world}")
    if repeat < 1:
        raise Unsupported(f"there must be at least 1 round, not {repeat}")
    cores = sorted(os.sched_getaffinity(0))
    results = launch(world, _measure_rank, cases, strategies, cores, repeat, report=report)
    scenarios: tuple[C3Scenario, ...] = results[0]
    title = f"this host, {ranks_label(world)} on {len(cores)} cores"
    return Study("cpu", title, world, DTYPE, True, scenarios)


def _measure_rank(
    report: Report,
    cases: Sequence[HostCase],
    strategies: Sequence[str],
    cores: Sequence[int],
    repeat: int,
) -> tuple[C3Scenario, ...]:
    fabric, placement = of(None), Placement(cores)
    found = []
    try:
        for number, case in enumerate(cases):

            def part(share: float, text: str, number: int = number, case: HostCase = case) -> None:
                report((number + share) / len(cases), f"{case.case.label}, {text}")

            found.append(_Bench(fabric, placement, case, strategies, part).scenario(repeat))
    finally:
        placement.close()
    return tuple(found)


class _Bench:
    """One scenario on this rank: its tensors, and the functions of all arms."""

    def __init__(
        self,
        fabric: Fabric,
        placement: Placement,
        case: HostCase,
        strategies: Sequence[str],
        report: Report,
    ) -> None:
        self.fabric, self.placement, self.report = fabric, placement, report
        self.case, self.multiple = case.case, case.multiple
        self.operation = op = self.case.operation(fabric.world, DTYPE)
        random = torch.Generator().manual_seed(fabric.rank + 1)
        self.a = torch.randn(op.m, op.k, generator=random)
        self.b = torch.randn(op.k, op.n, generator=random)
        self.c = torch.empty(op.m, op.n)
        rows = op.rows[fabric.rank]
        self.x = fabric.memory.empty((rows, op.columns), torch.float32)
        self.x.copy_(torch.randn(rows, op.columns, generator=random))
        self.nothing = torch.empty(0, 0)
        self.strategies: list[Strategy] = []
        self.refused: dict[str, str] = {}
        for strategy in map(Strategy.parse, strategies):
            reason = placement.impossible(strategy)
            if reason is None:
                self.strategies.append(strategy)
            else:
                self.refused[strategy.base] = reason

    def multiply(self) -> None:
        torch.mm(self.a, self.b, out=self.c)

    def move(self) -> None:
        nothing, kind = self.nothing, self.case.collective
        matmul_beside(nothing, nothing, self.x, collective=kind, strategy="concurrent")

    def call(self, strategy: Strategy) -> Callable[[], None]:
        def both() -> None:
            matmul_beside(
                self.a,
                self.b,
                self.x,
                collective=self.case.collective,
                strategy=strategy,
                out=self.c,
            )

        return lambda: self.placement.run(strategy, both)

    def scenario(self, repeat: int) -> C3Scenario:
        self.report(0.0, "warming up")
        for _ in range(2):
            self.move()  # engines start with their first copy
        # Other processes may slow the machine for a while. The fast samples show its usual speed.
        samples = sorted(timed(self.multiply) for _ in range(WARM_UP))
        compute = _slowest(samples[WARM_UP // 4])
        load = busiest_link(self.operation, "mesh")
        self.fabric.set_link(Link(load / (self.multiple * compute)))
        arms: dict[str, Callable[[], None]] = {"compute": self.multiply, "move": self.move}
        arms["serial"] = self.call(Strategy.of("serial"))
        arms.update({strategy.name: self.call(strategy) for strategy in self.strategies})
        names = list(arms)
        half = len(names) // 2
        turns = {name: arms[name] for name in names[:half]}
        turns[AGAIN] = self.multiply
        turns.update({name: arms[name] for name in names[half:]})
        rounds = _calm(
            interleaved(
                turns,
                repeat,
                lambda share, text: self.report(0.7 * share, text),
                before=self.multiply,
            )
        )
        seconds = {name: statistics.median(samples) for name, samples in rounds.items()}
        slower = self._slowdowns(arms, seconds["move"], min(repeat, RECORDED))
        outcomes = {}
        alone = list(zip(rounds["serial"], rounds["compute"], rounds["move"], strict=True))
        for strategy in self.strategies:
            own = list(zip(alone, rounds[strategy.name], strict=True))
            outcomes[strategy.base] = C3Outcome(
                strategy,
                seconds[strategy.name],
                statistics.median(serial / taken for (serial, _, _), taken in own),
                statistics.median(
                    percent_of_ideal(serial, taken, compute, move)
                    for (serial, compute, move), taken in own
                ),
                *slower[strategy.name],
            )
        bound = "memory" if self.case.m < 64 else "compute"
        return C3Scenario(
            self.case,
            bound,
            seconds["compute"],
            seconds["move"],
            seconds["serial"],
            outcomes,
            refused=self.refused,
        )

    def _slowdowns(
        self, arms: dict[str, Callable[[], None]], moving: float, recorded: int
    ) -> dict[str, tuple[float, float]]:
        """For every strategy, the slowdown of its GEMM relative to one alone just before it, and of
        its collective relative to one alone."""
        alone: list[float] = []
        with record() as recording:
            for number in range(recorded):
                self.report(0.7 + 0.3 * number / recorded, "recording")
                for strategy in self.strategies:
                    self.multiply()
                    alone.append(timed(self.multiply))
                    dist.barrier()
                    arms[strategy.name]()
        timelines = recording.gather()
        slowest = torch.tensor(alone, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        found: dict[str, tuple[float, float]] = {}
        for place, strategy in enumerate(self.strategies):
            every = range(place, len(timelines), len(self.strategies))
            ranks = range(self.fabric.world)
            multiplied = [
                max(timelines[i].matmul_seconds(rank) for rank in ranks) / slowest[i].item()
                for i in every
            ]
            moved = [max(_moving(timelines[i].of(rank)) for rank in ranks) for i in every]
            found[strategy.name] = (
                statistics.median(multiplied),
                statistics.median(moved) / moving if moving else 1.0,
            )
        return found


def _calm(rounds: dict[str, list[float]]) -> dict[str, list[float]]:
    """The rounds in which the machine kept its speed: both runs of the GEMM alone took about their
    usual time. If there are hardly any, all rounds count."""
    both = list(zip(rounds["compute"], rounds[AGAIN], strict=True))
    usual = sorted(one for pair in both for one in pair)[len(both) // 2]
    kept = [number for number, pair in enumerate(both) if max(pair) <= NEAR * usual]
    if len(kept) < max(3, len(both) // 4):
        return rounds
    return {name: [samples[number] for number in kept] for name, samples in rounds.items()}


def _moving(timeline: Timeline) -> float:
    """The seconds from the first span of a rank to the end of its last copy."""
    ends = [span.end for span in timeline.spans if span.kind == COMMUNICATION]
    return max(ends, default=timeline.start) - timeline.start


def _slowest(seconds: float) -> float:
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()
