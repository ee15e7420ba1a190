"""C3 on a machine one does not have: every scenario under every strategy, simulated."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from weft.errors import Unsupported
from weft.machine import Machine, measurements
from weft.plan.concurrent import COLLECTIVES, Concurrent
from weft.plan.tasks import Copy, Matmul
from weft.simulate import run
from weft.simulate.cost import collective, gemm
from weft.strategy import Driver, Strategy
from weft.study.c3 import rules
from weft.study.c3.cases import Case, llama
from weft.study.c3.findings import Choice, Outcome, Scenario, Study, UnitSweep
from weft.timeline import Timeline, percent_of_ideal

Report = Callable[[float, str], None]

WORLD = 8
PUBLISHED_ON = "mi300x"
"""The machine whose strategies were measured (arXiv 2412.14335)."""
DTYPE = "bfloat16"
TRIMS = (8, 16, 32, 64)
"""Units taken from a GEMM beside copy engines, in the sweep."""
TAKEN = (0, 8, 16, 32, 48, 64, 96, 128)
"""Units taken from a GEMM that is alone."""
LARGE = 1 << 30
"""Bytes of the collective whose time is shown by the units it has: beyond all latency."""


def study(
    machine: Machine,
    cases: Sequence[Case] | None = None,
    world: int | None = None,
    report: Report | None = None,
) -> Study:
    """Simulates scenarios, by default the 30 of `llama`, on a node of the machine."""
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


def timeline(machine: Machine, scenario: Scenario, base: str, world: int) -> Timeline:
    """The timeline behind an outcome, simulated anew."""
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


class _Alone:
    """What an operation takes with nothing beside it: its GEMM, and its collective by engine."""

    def __init__(self, machine: Machine, operation: Concurrent) -> None:
        only, moving = operation.compute_only(), operation.communication_only()
        self.compute = run(only.lower(Strategy.of("concurrent")), machine).seconds
        self.by: dict[Driver, float] = {
            "cores": run(moving.lower(Strategy.of("concurrent")), machine).seconds,
            "dma": run(moving.lower(Strategy.of("dma")), machine).seconds,
        }
        self.communication = self.by["cores"]
        self.serial = run(operation.lower(Strategy.of("serial")), machine).seconds


def _scenario(machine: Machine, case: Case, world: int) -> Scenario:
    operation = case.operation(world, DTYPE)
    alone = _Alone(machine, operation)

    def outcome(strategy: Strategy) -> Outcome:
        return _outcome(machine, operation, strategy, alone)

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
    return Scenario(
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


def _outcome(machine: Machine, operation: Concurrent, strategy: Strategy, alone: _Alone) -> Outcome:
    found = run(operation.lower(strategy), machine)
    multiplied = max(p.seconds for p in found.pieces if isinstance(p.task, Matmul))
    moved = max(p.end for p in found.pieces if isinstance(p.task, Copy))
    return Outcome(
        strategy,
        found.seconds,
        alone.serial / found.seconds,
        percent_of_ideal(alone.serial, found.seconds, alone.compute, alone.communication),
        multiplied / alone.compute,
        moved / alone.by[strategy.engine],
    )


def _choice(question: str, rule: Strategy, tried: Sequence[Outcome]) -> Choice:
    best = min(tried, key=_seconds)
    taken = next(outcome for outcome in tried if outcome.strategy == rule)
    return Choice(question, rule, best.strategy, taken.seconds / best.seconds - 1.0)


def _seconds(outcome: Outcome) -> float:
    return outcome.seconds


def _units(machine: Machine, cases: Sequence[Case], world: int) -> UnitSweep:
    """What units are worth to the GEMMs of the cases, and to a large collective, each alone."""
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
