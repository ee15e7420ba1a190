"""A model's step on a machine: each layer once under every schedule, and what overlap saves of it.

Layers follow each other, so a step takes the sum of their times. `serial` waits for every
collective, `overlapped` runs each layer under its best schedule (or serially, where that is best),
`auto` under the one that weft's rule picks, and `ideal` hides all that can be hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weft.dtype import rated
from weft.errors import Unsupported
from weft.machine import Machine
from weft.operation import find
from weft.plan.tasks import Plannable
from weft.schedule import Schedule
from weft.select import heuristic
from weft.simulate import check_fits, run
from weft.simulate.cost import bandwidth_of, collective, gemm
from weft.study.exploration import Scenario, explore_operation
from weft.study.layers.listing import SHARED, Layer, Model
from weft.study.scenarios import Shape

Report = Callable[[float, str], None]


@dataclass(frozen=True)
class Timed:
    """One layer, in seconds for one of it. `schedule` is what overlapped runs under, None where
    there is nothing to overlap."""

    layer: Layer
    compute: float
    communication: float
    serial: float
    overlapped: float
    auto: float
    schedule: Schedule | None = None
    chosen: Schedule | None = None

    @property
    def ideal(self) -> float:
        if not self.layer.overlaps:
            return self.serial
        return min(self.overlapped, max(self.compute, self.communication))

    @property
    def saves(self) -> float:
        """What overlap saves of all layers of this kind in a step."""
        return self.layer.count * (self.serial - self.overlapped)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.layer.name,
            "op": self.layer.op,
            "sizes": self.layer.sizes,
            "count": self.layer.count,
            "compute_ms": 1e3 * self.compute,
            "communication_ms": 1e3 * self.communication,
            "serial_ms": 1e3 * self.serial,
            "overlapped_ms": 1e3 * self.overlapped,
            "ideal_ms": 1e3 * self.ideal,
            "schedule": None if self.schedule is None else self.schedule.name,
            "auto": None if self.chosen is None else self.chosen.name,
            "auto_ms": 1e3 * self.auto,
            "saves_ms": 1e3 * (self.serial - self.overlapped),
            "saves_in_all_ms": 1e3 * self.saves,
        }


@dataclass(frozen=True)
class StepTime:
    """All layers of a model on a machine."""

    model: Model
    machine: Machine
    layers: tuple[Timed, ...]

    @property
    def serial(self) -> float:
        return self._sum("serial")

    @property
    def overlapped(self) -> float:
        return self._sum("overlapped")

    @property
    def auto(self) -> float:
        return self._sum("auto")

    @property
    def ideal(self) -> float:
        return self._sum("ideal")

    @property
    def saves(self) -> float:
        return self.serial - self.overlapped

    def _sum(self, name: str) -> float:
        return sum(float(getattr(one, name)) * one.layer.count for one in self.layers)

    def verdict(self) -> str:
        """How long a step takes, and where overlap pays most."""
        said = (
            f"On {self.model.world} x {self.machine.name} a step takes {_ms(self.serial)} with "
            f"every collective waited for, and {_ms(self.overlapped)} overlapped: "
            f"{_ms(self.saves)} less ({100 * self.saves / self.serial:.1f} %), of "
            f"{_ms(self.serial - self.ideal)} that could be hidden at most."
        )
        top = max(self.layers, key=lambda one: one.saves)
        if top.saves > 0.0:
            said += f" Most of it comes from {top.layer.name} ({_ms(top.saves)}, {top.schedule})."
        else:
            said += " No layer gains by overlap here."
        return said + f" With weft's own choices (auto) it takes {_ms(self.auto)}."

    def to_json(self) -> dict[str, Any]:
        """Plain data in milliseconds."""
        return {
            "model": self.model.title,
            "machine": self.machine.name,
            "world": self.model.world,
            "dtype": self.model.dtype,
            "serial_ms": 1e3 * self.serial,
            "overlapped_ms": 1e3 * self.overlapped,
            "auto_ms": 1e3 * self.auto,
            "ideal_ms": 1e3 * self.ideal,
            "saves_ms": 1e3 * self.saves,
            "saves_percent": 100.0 * self.saves / self.serial,
            "layers": [one.to_json() for one in self.layers],
            "assumptions": list(self.model.assumptions),
            "verdict": self.verdict(),
        }


def time_step(
    machine: Machine,
    model: Model,
    schedules: Sequence[Schedule] | None = None,
    report: Report | None = None,
) -> StepTime:
    """Simulates every layer of a model, equal ones once."""
    if model.world > machine.links.world:
        raise Unsupported(
            f"{model.title} is over {model.world} ranks; {machine.name} has "
            f"{machine.links.world} devices"
        )
    known: dict[tuple[object, ...], Scenario] = {}
    found = []
    for number, layer in enumerate(model.layers):
        if report is not None:
            report(number / len(model.layers), layer.name)
        try:
            if layer.overlaps and model.world > 1:
                found.append(_overlapping(machine, model, layer, schedules, known))
            else:
                found.append(_plain(machine, model, layer))
        except Unsupported as error:
            raise Unsupported(f"{layer.name}: {error}") from error
    return StepTime(model, machine, tuple(found))


def _overlapping(
    machine: Machine,
    model: Model,
    layer: Layer,
    schedules: Sequence[Schedule] | None,
    known: dict[tuple[object, ...], Scenario],
) -> Timed:
    operation: Any = _operation(layer, model)
    key = (layer.op, layer.m, layer.n, layer.k)
    scenario = known.get(key)
    if scenario is None:
        shape = Shape(layer.m, layer.n, layer.k, layer.name, model.dtype)
        scenario = known[key] = explore_operation(machine, operation, shape, schedules)
    if not scenario.outcomes:
        raise Unsupported(scenario.refused[0][1])
    best = scenario.best
    serial = best.seconds >= scenario.serial
    chosen = heuristic.choose(machine, operation).schedule
    return Timed(
        layer,
        scenario.compute,
        scenario.communication,
        scenario.serial,
        min(best.seconds, scenario.serial),
        _seconds(machine, operation, scenario, chosen),
        scenario.baseline if serial else best.schedule,
        chosen,
    )


def _operation(layer: Layer, model: Model) -> Plannable:
    sizes = {"m": layer.m, "n": layer.n, "k": layer.k}
    axis = SHARED[layer.op]
    sizes[axis] = -(-sizes[axis] // model.world)
    operation: Plannable = find(layer.op).of(**sizes, world=model.world, dtype=model.dtype)
    return operation


def _seconds(
    machine: Machine, operation: Plannable, scenario: Scenario, schedule: Schedule
) -> float:
    """What a schedule takes, simulated if it was not; serial where it does not fit."""
    for outcome in scenario.outcomes:
        if outcome.schedule == schedule:
            return outcome.seconds
    plan = operation.lower(schedule)
    try:
        check_fits(plan, machine)
    except Unsupported:
        return scenario.serial
    return run(plan, machine).seconds


def _plain(machine: Machine, model: Model, layer: Layer) -> Timed:
    """A layer with nothing to overlap: all of it is compute, or all of it communication."""
    compute = communication = 0.0
    if layer.op == "collective":
        total = layer.size * (model.world if layer.collective == "all_gather" else 1)
        asked = (machine, layer.collective, total, model.world)
        communication = min(collective(*asked), collective(*asked, driver="dma"))
    elif layer.op == "compute":
        compute = _kernel(machine, model, layer) + machine.launch.gap
    else:
        sizes = {"m": layer.m, "n": layer.n, "k": layer.k}
        compute = gemm(machine, **sizes, dtype=model.dtype).seconds + machine.launch.gap
    whole = compute + communication
    return Timed(layer, compute, communication, whole, whole, whole)


def _kernel(machine: Machine, model: Model, layer: Layer) -> float:
    """A kernel bound by arithmetic at some share of the GEMM rate, or by memory."""
    rate = machine.compute.rate.get(rated(model.dtype))
    if rate is None:
        known = ", ".join(machine.compute.rate)
        raise Unsupported(f"{machine.name} has no rate for {model.dtype}; it has {known}")
    arithmetic = layer.flops / model.world / (rate * layer.share)
    moving = machine.memory.latency + layer.bytes / model.world / bandwidth_of(machine)
    return machine.launch.kernel + max(arithmetic, moving)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms" if seconds < 0.1 else f"{1e3 * seconds:.1f} ms"
