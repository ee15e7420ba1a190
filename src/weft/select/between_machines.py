"""`schedule="auto"` where no description of the links is known: between machines, and on devices
without one.

`adaptive` is chosen unless there are too few rows for two GEMMs, each of which would read all of w.
"""

from __future__ import annotations

from typing import Any

from weft.plan.tasks import Matmul
from weft.schedule import Schedule
from weft.select.heuristic import Choice

FEW_ROWS = 128
"""With fewer rows to multiply on a rank, nothing is overlapped."""

_SERIAL, _ADAPTIVE = Schedule.parse("serial"), Schedule.parse("adaptive")


def choose(operation: Any, where: str = "ranks are on several machines") -> Choice:
    """The schedule of an operation. where: what is known of its ranks, for the reason."""
    rows = _rows(operation)
    if rows < FEW_ROWS:
        return Choice(_SERIAL, f"{where}, and {rows} rows are too few to cut")
    if getattr(operation, "refuses", lambda schedule: None)(_ADAPTIVE) is not None:
        return Choice(Schedule.parse("hetero-unfused-1d"), where)
    return Choice(_ADAPTIVE, where)


def _rows(operation: Any) -> int:
    """The largest number of rows that a rank multiplies."""
    tasks = operation.lower(_SERIAL).tasks
    return max((task.c.rows for task in tasks if isinstance(task, Matmul)), default=0)
