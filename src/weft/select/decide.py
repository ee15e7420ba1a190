"""The one place that chooses a schedule for a call.

A caller names a schedule (`decision.requested`) or leaves it to `auto`. Then these are asked in
this order: the environment, a fixed rule (`fixed.py`), an in-kernel schedule that is worth a try
(`fixed.py`), between machines a rule of its own (`between_machines.py`), on devices the rule for
their description (`on_device.py`), a tuned result (`store.py`), and the heuristic for this machine
(`heuristic.py`). A schedule that cannot be lowered is refused there, with the reason. A choice is
never replaced afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from weft.run.session import Session
from weft.select import auto
from weft.select.decision import (
    AUTO,
    AnySchedule,
    Decision,
    for_gradient,
    inherited,
    requested,
)

__all__ = [
    "AUTO",
    "AnySchedule",
    "Decision",
    "decide",
    "for_gradient",
    "inherited",
    "requested",
]


def decide(
    session: Session, name: str, key: Hashable, expected: Callable[[], Any], work: int = 1
) -> Decision:
    """The decision for a call of an operator with `schedule="auto"`. `key` identifies its sizes.

    expected: makes the operation if there is no decision for the key yet. If peers have other sizes
    than this rank expects, it is near enough for a choice. All ranks call this at the same point,
    with valid arguments, because the ranks meet in the first call. work: the time of a call is
    proportional to it; needed if one key covers calls of several sizes.
    """
    memory, known = auto.of(session), (name, key)
    settled = memory.settled(known)
    if settled is not None:
        return settled
    try:
        decision = memory.fixed(known, expected)
    except Exception as error:
        session.fabric.refuse(name, error)
        raise
    if decision is not None:
        return decision
    memory.meet(known)
    try:
        return memory.choose(known, expected, work)
    except Exception as error:
        session.fabric.refuse(name, error)
        raise
