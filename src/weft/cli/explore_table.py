"""The tables of `weft explore` on one machine: a row per shape, or per schedule of one shape."""

from __future__ import annotations

from weft.cli.console import console, n_said
from weft.report.cells import Cell
from weft.report.explore_figures import LOSSES
from weft.report.explore_page import rows_of, summary_of
from weft.report.run_report import SHARE
from weft.report.terminal_table import table
from weft.report.units import share
from weft.study.exploration import Exploration, Scenario, ScheduleOutcome

_MANY = (
    *("id", "comp.", "comm.", "serial", "ideal", "best schedule", "gain"),
    *("share of\ngain", "auto", "auto\ngain", "adap-\ntive", "shard\np2p"),
)
_MANY_DROP = (11, 10, 1, 2, 7, 4, 8)
"""Columns that go where there is no room, the first of them first."""
_ONE = (
    *("schedule", "ms", "gain", "share of\ngain"),
    *("ex-\nposed", "split-\nting", "conten-\ntion", "launch", "hidden"),
)
_ONE_DROP = (8, 7, 6, 5, 4, 3)


def show(found: Exploration) -> None:
    """Prints one row per scenario; for a single scenario, one row per schedule with its losses. The
    choice of `schedule="auto"` is a row or a column of its own."""
    if len(found.scenarios) > 1:
        caption = (
            f"Milliseconds on {found.world} x {found.machine.name}, simulated: compute and "
            "communication alone, one after the other, the longer of both; then speedups over "
            "serial, which is the faster of gathering with copy engines and with cores. "
            f"{SHARE}"
        )
        shown = table(
            _MANY, rows_of(found), caption=caption, width=120, whole=(5, 8), drop=_MANY_DROP
        )
        console.print(shown)
    else:
        _show_one(found.scenarios[0])
    console.print(summary_of(found))


def n_line(scenario: Scenario) -> str:
    """Both numbers that N can mean."""
    world = scenario.operation.world
    return n_said(-(-scenario.shape.n // world), world)


def _show_one(scenario: Scenario) -> None:
    console.print(
        f"{scenario.operation.label}\n{n_line(scenario)}\n"
        f"compute {scenario.compute * 1e3:.3f} ms, "
        f"communication {scenario.communication * 1e3:.3f} ms, "
        f"serial {scenario.serial * 1e3:.3f} ms, ideal {scenario.ideal * 1e3:.3f} ms"
    )
    rows = [_row(outcome.schedule.name, outcome) for outcome in scenario.outcomes]
    best = scenario.outcomes.index(scenario.best) if scenario.outcomes else None
    if scenario.auto is not None:
        rows.append(_row(f"auto: {scenario.auto.outcome.schedule}", scenario.auto.outcome))
    caption = (
        f"{SHARE} Losses are milliseconds over ideal: exposed communication, cost of splitting, "
        "contention, launch; hidden is negative: what of them fell into time in which ideal waits "
        "too, and so costs nothing."
    )
    if any(outcome.percent_of_ideal > 101 for outcome in scenario.outcomes):
        caption += (
            " Above 100 %: `direct` reads the memory of peers while it multiplies and copies "
            "nothing, so it need not take as long as the communication of serial."
        )
    console.print(table(_ONE, rows, best=best, caption=caption, drop=_ONE_DROP))
    for schedule, reason in scenario.refused:
        console.print(f"{schedule} is left out: {reason}")
    if scenario.auto is not None:
        console.print(f"auto chooses {scenario.auto.outcome.schedule}: {scenario.auto.why}.")


def _row(name: str, outcome: ScheduleOutcome) -> list[Cell]:
    return [
        name,
        outcome.seconds * 1e3,
        f"{outcome.speedup:.2f}x",
        share(outcome.percent_of_ideal),
        *(1e3 * float(getattr(outcome.losses, key)) for key, _, _ in LOSSES),
        outcome.losses.hidden * 1e3,
    ]
