"""The tables of `weft explore` on one machine: a row per shape, or per schedule of one shape."""

from __future__ import annotations

from typing import Any

from weft.cli.console import console
from weft.report.cells import Cell
from weft.report.explore_figures import LOSSES
from weft.report.explore_page import rows_of, summary_of
from weft.report.terminal import table
from weft.select.heuristic import choose
from weft.study.exploration import Exploration, Scenario

# Two-line headers leave room for the names of schedules in 100 columns.
_MANY = (
    *("id", "comp.", "comm.", "serial", "ideal", "best schedule", "gain"),
    *("of\nideal", "shard-\np2p", "adap-\ntive"),
)
_ONE = (
    *("schedule", "ms", "gain"),
    *("ex-\nposed", "decom-\npos.", "conten-\ntion", "launch", "% of\nideal", "hidden"),
)
_ROOMY = 96
"""Columns of a terminal that has room for all of a table; a narrower one shows less."""
_FEW = (0, 3, 4, 5, 6)
"""Columns of `_MANY` that a narrower terminal has room for."""


def show(found: Exploration) -> None:
    """Prints one row per scenario; for a single scenario, one row per schedule with its losses, and
    the choice of `schedule="auto"`."""
    if len(found.scenarios) > 1:
        caption = (
            f"Milliseconds on {found.world} x {found.machine.name}, simulated: compute and "
            "communication alone, one after the other, the longer of both; then speedups over "
            "serial, which is the faster of gathering with copy engines and with cores."
        )
        keep = range(len(_MANY)) if console.width >= _ROOMY else _FEW
        rows = [[row[place] for place in keep] for row in rows_of(found)]
        headers = [_MANY[place] for place in keep]
        names = (headers.index("best schedule"),)
        console.print(table(headers, rows, caption=caption, width=console.width, whole=names))
    else:
        _show_one(found.scenarios[0])
    console.print(summary_of(found))
    if len(found.scenarios) == 1:
        console.print(_chosen(found, found.scenarios[0]))


def _show_one(scenario: Scenario) -> None:
    console.print(
        f"{scenario.operation.label}\n"
        f"compute {scenario.compute * 1e3:.3f} ms, "
        f"communication {scenario.communication * 1e3:.3f} ms, "
        f"serial {scenario.serial * 1e3:.3f} ms, ideal {scenario.ideal * 1e3:.3f} ms"
    )
    rows: list[list[Cell]] = [
        [
            outcome.schedule.name,
            outcome.seconds * 1e3,
            f"{outcome.speedup:.2f}x",
            *(1e3 * float(getattr(outcome.losses, key)) for key, _, _ in LOSSES),
            round(outcome.percent_of_ideal),
            outcome.losses.hidden * 1e3,
        ]
        for outcome in scenario.outcomes
    ]
    keep = len(_ONE) if console.width >= _ROOMY else 3 + len(LOSSES)
    rows = [row[:keep] for row in rows]
    caption = (
        "Losses are milliseconds over ideal: exposed communication, decomposition, contention, "
        "launch; hidden is what of them fell into time in which ideal waits too."
    )
    best = scenario.outcomes.index(scenario.best)
    width = console.width
    console.print(table(_ONE[:keep], rows, best=best, caption=caption, width=width, whole=(0,)))
    for schedule, reason in scenario.refused:
        console.print(f"{schedule} is left out: {reason}")


def _chosen(found: Exploration, scenario: Scenario) -> str:
    """What `schedule="auto"` would choose there, and what that would take."""
    operation: Any = scenario.operation
    choice = choose(found.machine, operation).schedule
    known = next((o for o in scenario.outcomes if o.schedule == choice), None)
    said = "" if known is None else f", {known.seconds * 1e3:.3f} ms ({known.speedup:.2f}x)"
    return f'The rule behind schedule="auto" chooses {choice}{said}.'
