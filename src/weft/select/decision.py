"""The decision for a call: the schedule to run, and the one that was asked for."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from weft.errors import Unsupported
from weft.schedule import Schedule
from weft.strategy import Strategy

AUTO = "auto"
AnySchedule = Schedule | Strategy


class Decision(NamedTuple):
    """The schedule of a call. `header` goes into every header, and must be equal in all of them.

    asked: the schedule as the caller gave it. schedule: None if rank 0's header carries it.
    chosen: the name of the schedule and the reason, for rank 0's header. observe: called with the
    seconds of the call.
    """

    header: str
    asked: str
    schedule: AnySchedule | None
    why: str
    chosen: tuple[str, str] | None = None
    observe: Callable[[float], None] | None = None
    fused: Schedule | None = None
    """The in-kernel schedule that rank 0's header may carry instead of serial."""

    @property
    def placed(self) -> AnySchedule | None:
        """The schedule for which memory is placed before the ranks meet."""
        return self.schedule or self.fused


def requested(schedule: object) -> Decision | None:
    """The decision for a schedule that the caller names, or the environment if the caller asks for
    "auto"; None if a schedule must be chosen."""
    if schedule == AUTO:
        named = os.environ.get("WEFT_SCHEDULE") or AUTO
        return None if named == AUTO else _named(named, "WEFT_SCHEDULE is set")
    if not isinstance(schedule, str | Schedule):
        raise Unsupported(
            f"schedule must be a name or a weft.Schedule, not {type(schedule).__name__}"
        )
    return _named(schedule, "asked for")


@lru_cache(maxsize=1024)
def _named(schedule: str | Schedule, why: str) -> Decision:
    parsed = Schedule.parse(schedule) if isinstance(schedule, str) else schedule
    return Decision(parsed.name, parsed.name, parsed, why)


def inherited(
    decision: Decision | None, refuses: Callable[[Schedule], str | None]
) -> Decision | None:
    """The decision for a gradient, which inherits the schedule of its forward call. If the gradient
    refuses that schedule, it is the nearest possible one, with the reason."""
    if decision is None or not isinstance(decision.schedule, Schedule):
        return decision
    reason = refuses(decision.schedule)
    if reason is None:
        return decision
    nearest = Schedule.parse("hetero-unfused-1d").with_engine(decision.schedule.engine)
    why = f"the forward call asked for {decision.asked}; {reason}"
    return decision._replace(header=nearest.name, schedule=nearest, why=why)


def for_gradient(schedule: str) -> str:
    """The schedule of a gradient: that of its forward call, or "auto" if the forward call is
    `in-kernel`, which the gradient cannot be."""
    inside = schedule != AUTO and Schedule.parse(schedule).fusion == "kernel"
    return AUTO if inside else schedule
