"""`weft explore --machine mi300x,h100`: the same shapes on several machines, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.cli.console import console
from weft.cli.explore_table import n_line
from weft.report.cells import Cell
from weft.report.terminal_table import table
from weft.study.exploration import Exploration, Scenario

COLUMNS = 3
"""So many machines fit side by side into 80 columns; more follow below."""


def show_both(found: Sequence[Exploration]) -> None:
    """A row per schedule for one shape, else a row per shape; two columns per machine."""
    for start in range(0, len(found), COLUMNS):
        some = found[start : start + COLUMNS]
        if len(found[0].scenarios) == 1:
            _show_one([one.scenarios[0] for one in some], [one.machine.name for one in some])
        else:
            _show_many(some)


def to_json(found: Sequence[Exploration]) -> dict[str, Any]:
    """Plain data in milliseconds, a table for each machine."""
    machines = [{"machine": one.machine.name, **one.to_json()} for one in found]
    return {"machines": machines, "verdict": verdict(found)}


def verdict(found: Sequence[Exploration]) -> str:
    """What each machine makes of it, and which is quickest."""
    said = []
    for one in found:
        serial = sum(scenario.serial for scenario in one.scenarios)
        best = sum(min(s.serial, s.best.seconds) for s in one.scenarios)
        said.append((best, serial, one))
    said.sort(key=lambda entry: entry[0])
    (best, serial, first), (slow, _, last) = said[0], said[-1]
    what = "it" if len(first.scenarios) == 1 else f"all {len(first.scenarios)} shapes"
    gains = ", ".join(f"{one.machine.name} {serial / best:.2f}x" for best, serial, one in said)
    return (
        f"{first.machine.name} is the quickest: {1e3 * best:.3f} ms for {what} under the best "
        f"schedule, {slow / best:.2f}x as fast as {last.machine.name}. Overlap gives: {gains}."
    )


def _show_one(scenarios: Sequence[Scenario], names: Sequence[str]) -> None:
    console.print(f"{scenarios[0].operation.label}\n{n_line(scenarios[0])}")
    headers = ["schedule"]
    for name in names:
        headers += [f"{name}\nms", "\ngain"]
    known = [{o.schedule.name: o for o in scenario.outcomes} for scenario in scenarios]
    rows: list[list[Cell]] = []
    for title, value in (
        ("compute alone", "compute"),
        ("communication alone", "communication"),
        ("one after the other", "serial"),
    ):
        row: list[Cell] = [title]
        for scenario in scenarios:
            row += [1e3 * float(getattr(scenario, value)), None]
        rows.append(row)
    for schedule in dict.fromkeys(name for outcomes in known for name in outcomes):
        row = [schedule]
        for outcomes in known:
            one = outcomes.get(schedule)
            row += [None, None] if one is None else [1e3 * one.seconds, f"{one.speedup:.2f}x"]
        rows.append(row)
    row = ["auto"]
    for scenario in scenarios:
        chosen = scenario.auto
        row += (
            [None, None]
            if chosen is None
            else [1e3 * chosen.outcome.seconds, f"{chosen.outcome.speedup:.2f}x"]
        )
    if any(scenario.auto is not None for scenario in scenarios):
        rows.append(row)
    best = ", ".join(f"{n} {s.best.schedule}" for n, s in zip(names, scenarios, strict=True))
    caption = f"Gains are over one after the other. Best schedules: {best}."
    chosen_by = [(n, s.auto) for n, s in zip(names, scenarios, strict=True) if s.auto is not None]
    if chosen_by:
        said = ", ".join(f"{name} {chosen.outcome.schedule}" for name, chosen in chosen_by)
        caption += f" auto chooses: {said}."
    console.print(table(headers, rows, caption=caption, width=min(80, console.width)))


def _show_many(found: Sequence[Exploration]) -> None:
    headers = ["shape"]
    for one in found:
        headers += [f"{one.machine.name}\nserial", "\nbest", "\ngain"]
    rows: list[list[Cell]] = []
    for scenarios in zip(*(one.scenarios for one in found), strict=True):
        row: list[Cell] = [scenarios[0].shape.label]
        for scenario in scenarios:
            best = scenario.best
            row += [1e3 * scenario.serial, 1e3 * best.seconds, f"{best.speedup:.2f}x"]
        rows.append(row)
    caption = "Milliseconds: serial, and under the best schedule. --json names the schedules."
    console.print(table(headers, rows, caption=caption, width=min(80, console.width)))
