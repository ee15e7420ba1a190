"""Simulates C3 on a machine: every scenario under every strategy."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from weft.errors import Unsupported
from weft.machine import Machine, measurements
from weft.plan.concurrent import COLLECTIVES, Concurrent
from weft.plan.tasks import Copy, Matmul
from weft.simulate import run
from weft.simulate.cost import collective, gemm
from weft.strategy import Strategy
from weft.study.c3 import rules
from weft.study.c3.cases import C3Case, llama
from weft.study.c3.findings import C3Outcome, C3Scenario, RuleChoice, Study, UnitSweep
from weft.timeline import Timeline, percent_of_ideal

Report = Callable[[float, str], None]

WORLD = 8
PUBLISHED_ON = "mi300x"
"""The machine whose strategies were measured (arXiv 2412.14335)."""
DTYPE = "bfloat16"
TRIMS = (8, 16, 32, 64)
"""The numbers of units taken from a GEMM during copies by engines, in the sweep."""
TAKEN = (0, 8, 16, 32, 48, 64, 96, 128)
"""The numbers of units taken from a GEMM alone."""
LARGE = 1 << 30
"""The bytes of the collective in the sweep of units: so many that latency does not matter."""


def study(
    machine: Machine,
    cases: Sequence[C3Case] | None = None,
    world: int | None = None,
    report: Report | None = None,
) -> Study:
    """Simulates scenarios (default: the 30 of `llama`) on a node of the machine."""
    if machine.host is not None or machine.compute.tiling is None:
        raise Unsupported(f"C3 is simulated on devices; for {machine.name} it is measured")
    cases = llama() if cases is None else cases
    world = min(WORLD, machine.links.world) if world is None else world
    if not 2 <= world <= machine.links.world:
        raise Unsupported(
            f"{machine.name} has {machine.links.world} devices; C3 takes 2 or more of them, "
            f"not {world}"
        )
    found = []
    for number, case in enumerate(cases):
        if report is not None:
            report(number / len(cases), case.label)
        found.append(_scenario(machine, case, world))
    return Study(
        machine.name,
        machine.title,
        world,
        DTYPE,
        False,
        tuple(found),
        _units(machine, cases, world),
        {kind: rules.dma_pays_from(machine, kind, world) for kind in COLLECTIVES},
        _published(machine),
    )


def timeline(machine: Machine, scenario: C3Scenario, base: str, world: int) -> Timeline:
    """The timeline of an outcome, which is simulated again."""
    outcome = scenario.outcomes.get(base)
    if outcome is None:
        raise Unsupported(f"{base} was not simulated for {scenario.case.label}")
    plan = scenario.case.operation(world, DTYPE).lower(outcome.strategy)
    return run(plan, machine).timeline()


def _published(machine: Machine) -> dict[str, float]:
    if machine.name != PUBLISHED_ON:
        return {}
    lines = measurements("c3_strategies")
    return {line["strategy"]: float(line["percent_of_ideal"]) for line in lines}


class AloneTimes(NamedTuple):
    """The seconds of an operation's GEMM and of its collective alone, by engine and as the ideal
    counts it, and of both one after the other."""

    compute: float
    by: Mapping[str, float]
    communication: float
    serial: float


def _alone(machine: Machine, operation: Concurrent) -> AloneTimes:
    only, moving = operation.compute_only(), operation.communication_only()
    by = {
        "cores": run(moving.lower(Strategy.of("concurrent")), machine).seconds,
        "dma": run(moving.lower(Strategy.of("dma")), machine).seconds,
    }
    return AloneTimes(
        run(only.lower(Strategy.of("concurrent")), machine).seconds,
        by,
        by["cores"],
        run(operation.lower(Strategy.of("serial")), machine).seconds,
    )


def _scenario(machine: Machine, case: C3Case, world: int) -> C3Scenario:
    operation = case.operation(world, DTYPE)
    alone = _alone(machine, operation)

    def outcome(strategy: Strategy) -> C3Outcome:
        return outcome_of(machine, operation, strategy, alone)

    sweeps = {
        base: tuple(outcome(Strategy.of(base, units)) for units in rules.partitions(machine))
        for base in ("partitioned", "prioritized+partitioned")
    }
    sweeps["dma+trimmed"] = tuple(outcome(Strategy.of("dma+trimmed", units)) for units in TRIMS)
    trim = rules.trim(machine, operation)
    ladder = {name: outcome(Strategy.of(name)) for name in ("concurrent", "prioritized")}
    for base in ("partitioned", "prioritized+partitioned"):
        ladder[base] = min(sweeps[base], key=_seconds)
    ladder["dma"] = outcome(Strategy.of("dma"))
    ladder["dma+trimmed"] = outcome(trim)
    everything = [*ladder.values(), *(one for swept in sweeps.values() for one in swept)]
    everything.append(outcome(Strategy.of("serial")))
    dma = [ladder["dma"], *sweeps["dma+trimmed"]]
    launches = [ladder["concurrent"], ladder["prioritized"]]
    return C3Scenario(
        case,
        "memory" if rules.is_memory_bound(machine, operation) else "compute",
        alone.compute,
        alone.communication,
        alone.serial,
        ladder,
        sweeps,
        (
            _choice("what to launch first", rules.first(machine, operation), launches),
            _choice("units to reserve", rules.reserve(machine, operation), sweeps["partitioned"]),
            _choice("units to trim", trim, [*dma, ladder["dma+trimmed"]]),
            _choice("which strategy", rules.choose(machine, operation), everything),
        ),
    )


def outcome_of(
    machine: Machine, operation: Concurrent, strategy: Strategy, alone: AloneTimes
) -> C3Outcome:
    """Simulates a strategy, and compares it with what the parts take alone."""
    found = run(operation.lower(strategy), machine)
    multiplied = max(p.seconds for p in found.pieces if isinstance(p.task, Matmul))
    moved = max(p.end for p in found.pieces if isinstance(p.task, Copy))
    return C3Outcome(
        strategy,
        found.seconds,
        alone.serial / found.seconds,
        percent_of_ideal(alone.serial, found.seconds, alone.compute, alone.communication),
        multiplied / alone.compute,
        moved / alone.by[strategy.engine],
    )


def _choice(question: str, rule: Strategy, tried: Sequence[C3Outcome]) -> RuleChoice:
    best = min(tried, key=_seconds)
    taken = next(outcome for outcome in tried if outcome.strategy == rule)
    return RuleChoice(question, rule, best.strategy, taken.seconds / best.seconds - 1.0)


def _seconds(outcome: C3Outcome) -> float:
    return outcome.seconds


def _units(machine: Machine, cases: Sequence[C3Case], world: int) -> UnitSweep:
    """The effect of units on the GEMMs of the cases, and on a large collective, each alone."""
    total = machine.compute.units
    taken = tuple(units for units in TAKEN if units < total)
    slower: dict[str, list[list[float]]] = {"compute": [], "memory": []}
    for shape in dict.fromkeys((case.m, case.n, case.k) for case in cases):
        whole = gemm(machine, *shape, DTYPE)
        bound = "memory" if whole.memory_seconds > whole.compute_seconds else "compute"
        slower[bound].append(
            [gemm(machine, *shape, DTYPE, units=total - u).seconds / whole.seconds for u in taken]
        )
    given = tuple(units for units in (4, *rules.partitions(machine)) if units <= total)
    large: dict[str, tuple[float, ...]] = {
        kind: tuple(
            collective(machine, kind, LARGE, world, units=units)
            / collective(machine, kind, LARGE, world)
            for units in given
        )
        for kind in COLLECTIVES
    }
    means = {
        bound: tuple(map(statistics.fmean, zip(*rows, strict=True)))
        for bound, rows in slower.items()
        if rows
    }
    return UnitSweep(taken, means, given, large)
