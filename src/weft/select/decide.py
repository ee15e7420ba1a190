"""The one place that chooses a schedule for a call.

A caller names a schedule (`decision.requested`), or leaves it to `auto`; then it is, in this order:
what the environment names, a fixed rule (`fixed.py`), between machines a rule of its own
(`between_machines.py`), a tuned result (`store.py`), or the rule on this machine's description
(`heuristic.py`). A schedule that cannot be lowered is refused there, with the reason; nothing is
replaced after the choice.
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
    """What `schedule="auto"` runs in a call of an operator, for sizes that `key` stands for.

    expected: makes the operation where it is not known yet; where peers have other sizes than this
    rank expects, it is near enough to choose by. All ranks call this at the same place, with
    arguments that they accept: in the first call the ranks meet. work: what a call's time is in
    proportion to, where one key stands for calls of several sizes.
    """
    memory, known = auto.of(session), (name, key)
    try:
        decision = memory.fixed(known, expected)
    except Exception as error:
        session.fabric.refuse(name, error)
        raise
    if decision is not None:
        return decision
    memory.meet()
    try:
        return memory.choose(known, expected, work)
    except Exception as error:
        session.fabric.refuse(name, error)
        raise
