"""The answers of the studio: pure functions from a state to plain data in milliseconds.

`quick` is for every movement of a slider: four timelines per machine. `full` has all schedules.
`curve` and `map_row` simulate many cases with one schedule of each kind, so that they take seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import ceil, log2
from typing import Any

from weft.errors import Unsupported
from weft.machine import Machine, load
from weft.report.palette import fill_of, fills_of, lanes_of
from weft.schedule import Schedule
from weft.select import heuristic
from weft.select.sizes import NoRule
from weft.simulate import Simulation
from weft.studio import words
from weft.studio.state import MOST_ROWS, MOST_SIZE, State
from weft.study.exploration import Scenario, ScheduleOutcome, explore_operation
from weft.study.scenarios import Shape
from weft.timeline import Timeline

Answer = dict[str, Any]
Check = Callable[[], None]
"""Called between simulations; raises if nobody waits for the answer any more."""

FIRST_SHOWN = ("shard-p2p@dma", "hetero-unfused-1d@dma", "uniform-fused-1d@dma", "adaptive@dma")
"""Drawn with serial and auto's choice, as far as there is room. An adaptive schedule is last: every
rank merges other pieces, so that all ranks are simulated, which takes as long as the others do
together."""
KINDS = (
    "serial@dma",
    "shard-p2p@dma",
    "uniform-fused-1d@dma",
    "hetero-unfused-1d@dma",
    "hetero-fused-2d@dma",
    "adaptive@dma",
    "hetero-unfused-1d@direct",
)
"""One schedule of each kind, for curves and maps."""
RATES = tuple(2.0 ** (step / 2) for step in range(-6, 9))
"""Multiples of the link rate in `curve`: from an eighth to sixteen times."""
MAP_STEPS = (-3, -2, -1, 0, 1, 2, 3)
"""The sizes of a map: the asked one times 2 to the power of these."""
MOST_SPANS = 20_000


@dataclass(frozen=True)
class _Chosen:
    """What `auto` chooses, and the seconds that its rule expects of it and of serial."""

    schedule: Schedule
    seconds: float
    serial: float


def quick(state: State, rank: int | None = 0, check: Check = lambda: None) -> Answer:
    """The timelines of four schedules on every machine. rank: None is all ranks."""
    return {"machines": [_quick(state, machine, rank) for machine in state.machines()]}


def full(state: State, check: Check = lambda: None) -> Answer:
    """All schedules on every machine: times, where the time goes, and what to use."""
    found = []
    for machine in state.machines():
        check()
        found.append(_full(state, machine, check))
    return {"machines": found, "verdict": _both(found)}


def curve(state: State, check: Check = lambda: None) -> Answer:
    """The speedup over serial against the link rate, and where communication equals compute."""
    found = []
    for name in state.machine_names:
        rate = state.link or load(name).links.total_bandwidth / 1e9
        points = []
        for multiple in RATES:
            check()
            asked = replace(state, machine=name, beside="", link=min(rate * multiple, 1e5))
            (machine,) = asked.machines()
            points.append(_point(asked, machine))
        found.append(
            {
                "machine": name,
                "rate": rate,
                "points": points,
                "crossover": _crossing(points),
                "said": _curve_said(points, rate),
            }
        )
    return {"machines": found}


def map_row(state: State, row: int, check: Check = lambda: None) -> Answer:
    """One row of the map of the first machine: for N at one step, every M, the fastest schedule."""
    if not 0 <= row < len(MAP_STEPS):
        raise Unsupported(f"there is no row {row}; rows are 0 to {len(MAP_STEPS) - 1}")
    cells = []
    for step in MAP_STEPS:
        check()
        m = _scaled(state.m, step, MOST_ROWS)
        n = _scaled(state.n, MAP_STEPS[row], MOST_SIZE)
        asked = replace(state, m=m, n=n, beside="")
        (machine,) = asked.machines()
        scenario, chosen = _explored(asked, machine, _kinds(asked))
        best = scenario.best
        cells.append(
            {
                "m": m,
                "n": n,
                "name": best.schedule.name,
                "speedup": best.speedup,
                "auto": None if chosen is None else chosen.schedule.name,
            }
        )
    return {"row": row, "rows": len(MAP_STEPS), "cells": cells}


def timelines(state: State, check: Check = lambda: None) -> list[Timeline]:
    """The drawn timelines of all ranks, titled with machine and schedule, for a trace."""
    found = []
    for machine in state.machines():
        kept: dict[Schedule, Simulation] = {}
        scenario, chosen = _explored(state, machine, None, kept)
        for schedule in _shown(state, scenario, chosen):
            title = f"{machine.name} {schedule.name}"
            found.append(replace(kept[schedule].timeline(), title=title))
    return found


def _quick(state: State, machine: Machine, rank: int | None) -> Answer:
    operation = state.operation()
    chosen = _choice(machine, operation)
    names = [*((state.pinned,) if state.pinned else ()), *FIRST_SHOWN]
    wanted = [Schedule.parse(name) for name in names]
    if chosen is not None:
        wanted.insert(0, chosen.schedule)
    possible = set(Schedule.space(operation)) | ({chosen.schedule} if chosen else set())
    wanted = [one for one in dict.fromkeys(wanted) if one in possible and not one.serial][:3]
    serial = [Schedule.parse("serial@dma"), Schedule.parse("serial@cores")]
    kept: dict[Schedule, Simulation] = {}
    scenario, _ = _explored(state, machine, [*serial, *wanted], kept, chosen)
    there = {outcome.schedule for outcome in scenario.outcomes}
    shown = [scenario.baseline, *(one for one in wanted if one in there)]
    one_rank = None if rank is None else rank % state.world
    drawn = [kept[one].timeline(one_rank) for one in shown]
    if sum(len(timeline.spans) for timeline in drawn) > MOST_SPANS:
        raise Unsupported("that is too much to draw; choose one rank")
    return {
        **_times(scenario, machine),
        "auto": _auto_json(scenario, chosen),
        "timelines": [
            {
                **_row(scenario.outcome(schedule), scenario, chosen),
                **spans(timeline),
            }
            for schedule, timeline in zip(shown, drawn, strict=True)
        ],
        "legend": legend(drawn),
    }


def _full(state: State, machine: Machine, check: Check) -> Answer:
    scenario, chosen = _explored(state, machine, None, check=check)
    outcome = _outcome(scenario, chosen)
    ordered = sorted(scenario.outcomes, key=lambda one: one.seconds)
    return {
        **_times(scenario, machine),
        "auto": _auto_json(scenario, chosen),
        "schedules": [_row(one, scenario, chosen) for one in ordered],
        "refused": [{"name": s.name, "why": why} for s, why in scenario.refused],
        "verdict": words.verdict(scenario, outcome),
    }


def _explored(
    state: State,
    machine: Machine,
    schedules: Sequence[Schedule] | None,
    kept: dict[Schedule, Simulation] | None = None,
    chosen: _Chosen | None = None,
    check: Check = lambda: None,
) -> tuple[Scenario, _Chosen | None]:
    """The scenario of a state, with auto's choice among the schedules. chosen: the choice, if it is
    known already."""
    operation = state.operation()
    chosen = chosen or _choice(machine, operation)
    wanted = list(Schedule.space(operation) if schedules is None else schedules)
    if chosen is not None and chosen.schedule not in wanted:
        wanted.append(chosen.schedule)
    shape = Shape(state.m, state.n, state.k, dtype=state.dtype)

    def checked() -> Iterator[Schedule]:
        for one in wanted:
            check()
            yield one

    scenario = explore_operation(machine, operation, shape, checked(), kept)
    if not scenario.outcomes:
        raise Unsupported(scenario.refused[0][1])
    return scenario, chosen


def _choice(machine: Machine, operation: Any) -> _Chosen | None:
    """What auto's rule chooses; None where there is no rule for the operation."""
    try:
        choice = heuristic.choose(machine, operation)
        seconds = heuristic.estimates(machine, operation, [choice.schedule, choice.serial])
    except NoRule:
        return None
    return _Chosen(choice.schedule, seconds[choice.schedule], seconds[choice.serial])


def _shown(state: State, scenario: Scenario, chosen: _Chosen | None) -> list[Schedule]:
    names = [state.pinned, scenario.best.schedule.name, *FIRST_SHOWN]
    wanted = [scenario.baseline, *([chosen.schedule] if chosen else [])]
    wanted += [Schedule.parse(name) for name in names if name]
    there = {outcome.schedule for outcome in scenario.outcomes}
    return [one for one in dict.fromkeys(wanted) if one in there][:4]


def _kinds(state: State) -> list[Schedule]:
    possible = set(Schedule.space(state.operation()))
    return [one for one in map(Schedule.parse, KINDS) if one in possible]


def _times(scenario: Scenario, machine: Machine) -> Answer:
    return {
        "machine": machine.name,
        "title": machine.title,
        "compute_ms": 1e3 * scenario.compute,
        "communication_ms": 1e3 * scenario.communication,
        "serial_ms": 1e3 * scenario.serial,
        "ideal_ms": 1e3 * scenario.ideal,
        "baseline": scenario.baseline.name,
        "balance": words.balance(scenario),
    }


def _row(outcome: ScheduleOutcome, scenario: Scenario, chosen: _Chosen | None) -> Answer:
    schedule = outcome.schedule
    return {
        "name": schedule.name,
        "ms": 1e3 * outcome.seconds,
        "speedup": outcome.speedup,
        "share": outcome.percent_of_ideal,
        "losses": {cause: 1e3 * seconds for cause, seconds in asdict(outcome.losses).items()},
        "auto": chosen is not None and schedule == chosen.schedule,
        "best": schedule == scenario.best.schedule,
        "serial": schedule.serial,
        "does": words.described(schedule),
    }


def _auto_json(scenario: Scenario, chosen: _Chosen | None) -> Answer | None:
    if chosen is None:
        return None
    outcome = _outcome(scenario, chosen)
    return {
        "name": chosen.schedule.name,
        "ms": None if outcome is None else 1e3 * outcome.seconds,
        "speedup": None if outcome is None else outcome.speedup,
        "why": words.reason(scenario, chosen.schedule, chosen.seconds, chosen.serial),
        "does": words.described(chosen.schedule),
    }


def _outcome(scenario: Scenario, chosen: _Chosen | None) -> ScheduleOutcome | None:
    if chosen is None:
        return None
    return next((one for one in scenario.outcomes if one.schedule == chosen.schedule), None)


def spans(timeline: Timeline) -> Answer:
    """The spans of a timeline as columns, which are a third of the size of objects."""
    lanes = lanes_of(timeline)
    rows = {lane: number for number, lane in enumerate(lanes)}
    spans = timeline.spans
    return {
        "lanes": [[rank, lane] for rank, lane in lanes],
        "row": [rows[span.rank, span.lane] for span in spans],
        "start": [round(1e3 * span.start, 6) for span in spans],
        "length": [round(1e3 * span.seconds, 6) for span in spans],
        "task": [span.task for span in spans],
        "kind": [span.kind for span in spans],
        "bytes": [span.num_bytes for span in spans],
        "flops": [span.num_flops for span in spans],
        "colour": [fill_of(span).colour for span in spans],
    }


def legend(drawn: Sequence[Timeline]) -> list[Answer]:
    return [{"name": fill.name, "colour": fill.colour} for fill in fills_of(drawn)]


def _point(asked: State, machine: Machine) -> Answer:
    scenario, chosen = _explored(asked, machine, _kinds(asked))
    outcome = _outcome(scenario, chosen)
    return {
        "rate": asked.link,
        "best": scenario.best.speedup,
        "name": scenario.best.schedule.name,
        "auto": None if outcome is None else outcome.speedup,
        "possible": scenario.serial / scenario.ideal if scenario.ideal else 1.0,
        "compute_ms": 1e3 * scenario.compute,
        "communication_ms": 1e3 * scenario.communication,
    }


def _crossing(points: Sequence[Answer]) -> float | None:
    """The link rate at which communication takes as long as compute, between two points."""
    for before, after in pairwise(points):
        high = log2(before["communication_ms"] / before["compute_ms"])
        low = log2(after["communication_ms"] / after["compute_ms"])
        if high >= 0.0 >= low and high > low:
            share = high / (high - low)
            return float(before["rate"] * (after["rate"] / before["rate"]) ** share)
    return None


def _curve_said(points: Sequence[Answer], rate: float) -> str:
    top = max(points, key=lambda point: float(point["best"]))
    said = f"Overlap gains most near {top['rate']:.0f} GB/s: {top['best']:.2f}x with {top['name']}."
    crossing = _crossing(points)
    if crossing is None:
        slow = points[-1]["communication_ms"] > points[-1]["compute_ms"]
        limit = "the links stay the limit" if slow else "compute stays the limit"
        return f"{said} At every rate shown, {limit}."
    which = "compute" if rate > crossing else "the links"
    return (
        f"{said} Communication takes as long as compute at {crossing:.0f} GB/s; "
        f"at {rate:.0f} GB/s, {which} {'is' if rate > crossing else 'are'} the limit."
    )


def _both(found: Sequence[Answer]) -> str:
    if len(found) == 1:
        return str(found[0]["verdict"])
    first, second = sorted(found, key=lambda one: float(one["schedules"][0]["ms"]))
    times = second["schedules"][0]["ms"] / first["schedules"][0]["ms"]
    return (
        f"{first['machine']} is {times:.2f}x as fast as {second['machine']}, each with its best "
        f"schedule."
    )


def _scaled(size: int, step: int, most: int) -> int:
    return max(1, min(most, ceil(size * 2.0**step)))
