"""How plans are made where some ranks are on other machines."""

from __future__ import annotations

from collections.abc import Sequence

from weft.errors import Unsupported
from weft.plan.tasks import Plan, Plannable
from weft.schedule import Schedule


def lower(operation: Plannable, schedule: Schedule, nodes: Sequence[int]) -> Plan:
    """The plan of an operation whose rank r is on the machine nodes[r]."""
    if schedule.engine == "direct":
        raise Unsupported(
            f"{schedule} cannot be run between machines: direct reads a peer's memory in place, "
            f"and a network has none to read; use {schedule.with_engine('dma')}"
        )
    return operation.lower(schedule)
