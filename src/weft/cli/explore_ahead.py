"""`weft explore --planned`: what it costs to decide `adaptive` ahead, as streams of a GPU must."""

from __future__ import annotations

from typing import Any

from weft.cli.console import console
from weft.report.terminal_table import table
from weft.study.deciding_ahead import ADAPTIVE, deciding_ahead, mean_loss
from weft.study.exploration import Exploration


def show_ahead(found: Exploration) -> None:
    """Prints every shape decided by arrivals and planned, and the mean loss."""
    every = deciding_ahead(found)
    rows: list[list[str | float]] = [
        [one.label, one.decided * 1e3, one.planned * 1e3, f"{one.loss_percent:+.1f} %"]
        for one in every
    ]
    headers = ["shape", "decided by arrivals", "planned", "longer by"]
    caption = f"Milliseconds of {ADAPTIVE} on {found.world} x {found.machine.name}, simulated."
    console.print(table(headers, rows, caption=caption, width=console.width, whole=(0,)))
    worst = max(every, key=lambda one: one.loss_percent)
    console.print(
        f"Planned, {ADAPTIVE} takes {mean_loss(every):+.1f} % more time on average, at worst "
        f"{worst.loss_percent:+.1f} % ({worst.label})."
    )


def ahead_json(found: Exploration) -> list[dict[str, Any]]:
    return [
        {
            "shape": one.label,
            "decided_ms": one.decided * 1e3,
            "planned_ms": one.planned * 1e3,
            "loss_percent": one.loss_percent,
        }
        for one in deciding_ahead(found)
    ]
