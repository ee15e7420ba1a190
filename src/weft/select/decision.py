"""What a call is to run, and what the caller asked for."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from weft.errors import Unsupported
from weft.schedule import Schedule
from weft.strategy import Strategy

AUTO = "auto"
AnySchedule = Schedule | Strategy


class Decision(NamedTuple):
    """What a call is to run. `header` goes into every header, and must be the same in all.

    asked: the schedule as the caller gave it. schedule: None if rank 0's header carries it.
    chosen: what rank 0's header carries: the name of the schedule, and why.
    """

    header: str
    asked: str
    schedule: AnySchedule | None
    why: str
    chosen: tuple[str, str] | None = None
    observe: Callable[[float], None] | None = None


def requested(schedule: object) -> Decision | None:
    """The schedule that the caller names, or the environment where the caller leaves it open; None
    where it is to be chosen."""
    if isinstance(schedule, Schedule):
        return Decision(schedule.name, schedule.name, schedule, "asked for")
    if not isinstance(schedule, str):
        raise Unsupported(
            f"schedule must be a name or a weft.Schedule, not {type(schedule).__name__}"
        )
    why = "asked for"
    if schedule == AUTO:
        schedule, why = os.environ.get("WEFT_SCHEDULE") or AUTO, "WEFT_SCHEDULE is set"
        if schedule == AUTO:
            return None
    parsed = Schedule.parse(schedule)
    return Decision(parsed.name, parsed.name, parsed, why)


def inherited(
    decision: Decision | None, refuses: Callable[[Schedule], str | None]
) -> Decision | None:
    """For a gradient that inherits the schedule of its forward call: that schedule, or the nearest
    one that the gradient has, with the reason."""
    if decision is None or not isinstance(decision.schedule, Schedule):
        return decision
    reason = refuses(decision.schedule)
    if reason is None:
        return decision
    nearest = Schedule.parse("hetero-unfused-1d").with_engine(decision.schedule.engine)
    why = f"the forward call asked for {decision.asked}; {reason}"
    return decision._replace(header=nearest.name, schedule=nearest, why=why)


def for_gradient(schedule: str) -> str:
    """The schedule of a gradient whose forward call communicates from inside its kernel, which the
    gradient cannot: chosen for it. Any other schedule is inherited."""
    inside = schedule != AUTO and Schedule.parse(schedule).fusion == "kernel"
    return AUTO if inside else schedule
