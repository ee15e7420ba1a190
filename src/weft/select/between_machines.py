"""`schedule="auto"` where some ranks are on other machines; the network needs no description.

`adaptive` is chosen unless there are too few rows to make two GEMMs of: each would read all of w.
"""

from __future__ import annotations

from typing import Any

from weft.plan.tasks import Matmul
from weft.schedule import Schedule
from weft.select.heuristic import Choice

FEW_ROWS = 128
"""Below so many rows to multiply on a rank, nothing is overlapped."""

_SERIAL, _ADAPTIVE = Schedule.parse("serial"), Schedule.parse("adaptive")


def choose(operation: Any) -> Choice:
    """The schedule of an operation between machines."""
    rows = _rows(operation)
    if rows < FEW_ROWS:
        return Choice(_SERIAL, f"ranks are on several machines, and {rows} rows are too few to cut")
    if getattr(operation, "refuses", lambda schedule: None)(_ADAPTIVE) is not None:
        return Choice(Schedule.parse("hetero-unfused-1d"), "ranks are on several machines")
    return Choice(_ADAPTIVE, "ranks are on several machines")


def _rows(operation: Any) -> int:
    """The rows that the rank with most of them multiplies."""
    tasks = operation.lower(_SERIAL).tasks
    return max((task.c.rows for task in tasks if isinstance(task, Matmul)), default=0)
