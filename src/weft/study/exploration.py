"""Explores how much overlap gives, under which schedule, and why: simulates shapes x schedules.

Every shape has four times. `compute` and `communication` are each simulated alone, `serial` is one
after the other, and `ideal` is the longer of the two. Serial is the faster one of gathering with
copy engines and gathering with cores. So a schedule gains only by overlapping, not by a better
engine.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from weft import html
from weft.errors import Unsupported, keeping
from weft.machine import Machine
from weft.operation import find, ranks_label
from weft.plan.tasks import AnyTask, Copy, Plan, Plannable
from weft.schedule import Schedule
from weft.select.heuristic import Choice, choose
from weft.select.sizes import NoRule
from weft.simulate import Losses, Simulation, check_fits, losses, run
from weft.study.scenarios import Shape
from weft.timeline import Timeline, percent_of_ideal

Progress = Callable[[int, int, str], None]
"""A progress callback: the number of finished scenarios, of all, and the next one."""

_SHOWN = 12
"""Schedules of one shape that a notebook shows."""


@dataclass(frozen=True)
class ScheduleOutcome:
    """One schedule in one scenario."""

    schedule: Schedule
    seconds: float
    speedup: float
    percent_of_ideal: float
    losses: Losses


@dataclass(frozen=True)
class AutoOutcome:
    """What `schedule="auto"` chooses in one scenario by its rule, what that takes, and the reason.
    Calls on the real machine also try its rivals, which a simulation has no need of."""

    outcome: ScheduleOutcome
    why: str


@dataclass(frozen=True)
class Scenario:
    """One shape: its four times in seconds, and every schedule that fits the machine.

    refused: the schedules that do not fit, with the reason. auto: the choice of `auto`, if it was
    asked for.
    """

    shape: Shape
    operation: Plannable
    baseline: Schedule
    compute: float
    communication: float
    serial: float
    outcomes: tuple[ScheduleOutcome, ...]
    refused: tuple[tuple[Schedule, str], ...] = ()
    auto: AutoOutcome | None = None

    @property
    def ideal(self) -> float:
        return max(self.compute, self.communication)

    @property
    def best(self) -> ScheduleOutcome:
        """The fastest of all; `auto` counts if nothing else was asked for."""
        known = self.outcomes or ((self.auto.outcome,) if self.auto is not None else ())
        return min(known, key=lambda outcome: outcome.seconds)

    @property
    def auto_percent_slower(self) -> float | None:
        """How much longer the choice of `auto` takes than the best schedule, in percent."""
        if self.auto is None or not self.best.seconds:
            return None
        return max(0.0, 100.0 * (self.auto.outcome.seconds / self.best.seconds - 1.0))

    def outcome(self, schedule: Schedule | str) -> ScheduleOutcome:
        """The outcome of a schedule."""
        wanted = Schedule.parse(schedule) if isinstance(schedule, str) else schedule
        for outcome in self.outcomes:
            if outcome.schedule == wanted:
                return outcome
        reasons = dict(self.refused)
        raise Unsupported(
            f"{wanted} was refused: {reasons[wanted]}"
            if wanted in reasons
            else f"{wanted} was not explored for {self.shape.label}"
        )


@dataclass(frozen=True)
class Exploration:
    """All scenarios on one machine."""

    machine: Machine
    operation: str
    world: int
    scenarios: tuple[Scenario, ...]

    def __repr__(self) -> str:
        count = len(self.scenarios)
        where = f"{ranks_label(self.world)} of {self.machine.name}"
        return f"<Exploration of {self.operation} on {where}: {count} shape{'s'[: count != 1]}>"

    def _repr_html_(self) -> str:
        """A table for notebooks: the fastest schedules of one shape, or the fastest of each."""
        title = f"{self.operation} on {ranks_label(self.world)} of {self.machine.title}, simulated"
        headers = ("shape", "schedule", "ms", "over serial")
        if len(self.scenarios) == 1:
            (one,) = self.scenarios
            shown = [(one, o) for o in sorted(one.outcomes, key=lambda o: o.seconds)[:_SHOWN]]
        else:
            shown = [(scenario, scenario.best) for scenario in self.scenarios]
        rows = [
            (s.shape.label, o.schedule, f"{o.seconds * 1e3:.3f}", f"{o.speedup:.2f}x")
            for s, o in shown
        ]
        return html.table(rows, headers, title)

    def scenario(self, label: str) -> Scenario:
        for scenario in self.scenarios:
            if scenario.shape.label == label:
                return scenario
        raise Unsupported(f"there is no scenario {label!r}")

    def timeline(self, label: str, schedule: Schedule | str) -> Timeline:
        """The timeline of an outcome. It is simulated again, which is cheaper than keeping it."""
        scenario = self.scenario(label)
        plan = scenario.operation.lower(scenario.outcome(schedule).schedule)
        return run(plan, self.machine).timeline()

    def to_json(self) -> dict[str, Any]:
        """Plain data in milliseconds, for `json.dump`."""
        return {"scenarios": [_scenario_json(scenario) for scenario in self.scenarios]}


MOST_RANKS = 256


def explore(
    machine: Machine,
    operation_name: str,
    shapes: Sequence[Shape],
    world: int,
    schedules: Sequence[Schedule] | None = None,
    progress: Progress | None = None,
    *,
    auto: bool | None = None,
) -> Exploration:
    """Simulates schedules (default: `Schedule.space`) of an operation for every shape.

    auto: whether also the choice of `schedule="auto"`; by default if all schedules are simulated.
    Shapes are unsharded: every rank has N / world columns of B, rounded up. A schedule whose
    workspace does not fit is left out, with the reason. A shape that does not fit is an error.
    Ctrl-C raises `Stopped` with the shapes that were finished.
    """
    if world < 1:
        raise Unsupported(f"there must be at least 1 rank, not {world}")
    if world > machine.links.world:
        raise Unsupported(
            f"{world} ranks need {world} devices; {machine.name} has {machine.links.world}. "
            "For more, ask about a cluster with --nodes"
        )
    if world > MOST_RANKS:
        raise Unsupported(
            f"at most {MOST_RANKS} ranks can be explored, not {world}, because a plan has tasks "
            "for every pair of ranks; for more, ask about a cluster with --nodes"
        )
    if not shapes:
        raise Unsupported("there are no shapes to explore")
    kind = find(operation_name)
    with_auto = schedules is None if auto is None else auto
    scenarios: list[Scenario] = []

    def found() -> Exploration:
        return Exploration(machine, operation_name, world, tuple(scenarios))

    with _uncollected(), keeping(lambda: found() if scenarios else None):
        for number, shape in enumerate(shapes):
            if progress is not None:
                progress(number, len(shapes), shape.label)
            columns = -(-shape.n // world)
            operation = shape.operation(kind, columns, world)
            try:
                scenarios.append(_explore(machine, operation, shape, schedules, with_auto))
            except Unsupported as error:
                raise Unsupported(f"{shape.label}: {error}") from error
    if progress is not None:
        progress(len(shapes), len(shapes), "")
    return found()


def explore_operation(
    machine: Machine,
    operation: Plannable,
    shape: Shape,
    schedules: Iterable[Schedule] | None = None,
    kept: dict[Schedule, Simulation] | None = None,
) -> Scenario:
    """Simulates schedules of one operation, whatever its sizes mean; `shape` names it. The
    simulations, which are large, are put into `kept` if it is given."""
    with _uncollected():
        return _explore(machine, operation, shape, schedules, schedules is None, kept)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Pauses the garbage collector. Plans and simulations are large but have no reference cycles,
    so that it would scan a growing heap for nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _explore(
    machine: Machine,
    operation: Plannable,
    shape: Shape,
    schedules: Iterable[Schedule] | None,
    auto: bool,
    kept: dict[Schedule, Simulation] | None = None,
) -> Scenario:
    known: dict[Schedule, Simulation] = {}
    for engine in ("dma", "cores"):
        schedule = Schedule.parse(f"serial@{engine}")
        known[schedule] = run(operation.lower(schedule), machine)
    baseline = min(known, key=lambda schedule: known[schedule].seconds)
    serial = known[baseline].seconds
    alone: Any = operation.compute_only()
    compute = run(alone.lower(Schedule.parse("serial")), machine)
    communication = run(_only_copies(operation.lower(baseline)), machine).seconds

    outcomes: dict[Schedule, ScheduleOutcome] = {}
    refused = []

    def simulated(schedule: Schedule) -> ScheduleOutcome | None:
        """The outcome of a schedule; None, and the reason is kept, if it does not fit."""
        plan = operation.lower(schedule)
        try:
            check_fits(plan, machine)
        except Unsupported as error:
            refused.append((schedule, str(error)))
            return None
        simulation = known.get(schedule) or run(plan, machine)
        if kept is not None:
            kept[schedule] = simulation
        seconds = simulation.seconds
        return ScheduleOutcome(
            schedule,
            seconds,
            serial / seconds if seconds else 1.0,
            percent_of_ideal(serial, seconds, compute.seconds, communication),
            losses(simulation, compute, communication),
        )

    for schedule in Schedule.space(operation) if schedules is None else schedules:
        found = simulated(schedule)
        if found is not None:
            outcomes[schedule] = found
    chosen = None
    if auto:
        choice = _choice(machine, operation)
        found = outcomes.get(choice.schedule)
        if found is None and choice.schedule not in dict(refused):
            found = simulated(choice.schedule)
        chosen = None if found is None else AutoOutcome(found, choice.why)
    return Scenario(
        shape,
        operation,
        baseline,
        compute.seconds,
        communication,
        serial,
        tuple(outcomes.values()),
        tuple(refused),
        chosen,
    )


def _choice(machine: Machine, operation: Any) -> Choice:
    """What `auto` chooses: by its rule, or serial for an operation that has none."""
    try:
        return choose(machine, operation)
    except NoRule as unknown:
        return Choice(Schedule.parse("serial"), f"{unknown} to overlap")


def _only_copies(plan: Plan) -> Plan:
    """The communication of a plan, without its compute."""
    copies = [task for task in plan.tasks if isinstance(task, Copy)]
    ids = {task.id: number for number, task in enumerate(copies)}
    tasks: list[AnyTask] = [
        replace(task, id=ids[task.id], after=tuple(ids[i] for i in task.after if i in ids))
        for task in copies
    ]
    return replace(plan, tasks=tuple(tasks))


def _scenario_json(scenario: Scenario) -> dict[str, Any]:
    return {
        "id": scenario.shape.label,
        "compute_ms": 1e3 * scenario.compute,
        "communication_ms": 1e3 * scenario.communication,
        "serial_ms": 1e3 * scenario.serial,
        "ideal_ms": 1e3 * scenario.ideal,
        "schedules": [
            {
                "name": outcome.schedule.name,
                "ms": 1e3 * outcome.seconds,
                "speedup": outcome.speedup,
                "percent_of_ideal": outcome.percent_of_ideal,
                "losses": {
                    f"{cause}_ms": 1e3 * seconds
                    for cause, seconds in asdict(outcome.losses).items()
                },
            }
            for outcome in scenario.outcomes
        ],
        "auto": _auto_json(scenario),
    }


def _auto_json(scenario: Scenario) -> dict[str, Any] | None:
    if scenario.auto is None:
        return None
    return {
        "schedule": scenario.auto.outcome.schedule.name,
        "ms": 1e3 * scenario.auto.outcome.seconds,
        "speedup": scenario.auto.outcome.speedup,
        "slower_than_best_percent": scenario.auto_percent_slower,
        "why": scenario.auto.why,
    }
