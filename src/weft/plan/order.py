"""The order of the tasks of a plan: dependencies and lane queues together."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from weft.errors import InvalidPlan
from weft.plan.tasks import AnyTask, Plan


def predecessors(plan: Plan) -> list[list[int]]:
    """For every task, the tasks that must end before it: its `after`, and those ahead in its lane.

    Loose tasks may run in any order among themselves. A lane orders them only relative to the fixed
    tasks around them.
    """
    before: list[list[int]] = [list(task.after) for task in plan.tasks]
    for queue in plan.lanes.values():
        last_fixed: AnyTask | None = None
        loose: list[AnyTask] = []
        for task in queue:
            if last_fixed is not None:
                before[task.id].append(last_fixed.id)
            if task.loose:
                loose.append(task)
            else:
                before[task.id].extend(other.id for other in loose)
                last_fixed, loose = task, []
    return before


def topological(
    plan: Plan, before: list[list[int]], pick: Callable[[list[int]], int] = list.pop
) -> list[int]:
    """All tasks, each after its predecessors. Raises `InvalidPlan` if there is a cycle.

    `pick` removes the next task from the list of ready ones.
    """
    waiting = [len(tasks) for tasks in before]
    followers: list[list[int]] = [[] for _ in before]
    for task, tasks in enumerate(before):
        for other in tasks:
            followers[other].append(task)
    ready = [task for task, count in enumerate(waiting) if count == 0]
    order: list[int] = []
    while ready:
        task = pick(ready)
        order.append(task)
        for follower in followers[task]:
            waiting[follower] -= 1
            if waiting[follower] == 0:
                ready.append(follower)
    if len(order) < len(before):
        stuck = [plan.tasks[i] for i, count in enumerate(waiting) if count]
        names = ", ".join(f"{t.label!r} of rank {t.rank}" for t in stuck[:4])
        raise InvalidPlan(f"cycle: {len(stuck)} tasks wait for each other, among them {names}")
    return order


def ancestors(order: list[int], before: list[list[int]]) -> list[int]:
    """For every task, the bit mask of all tasks that must have ended before it starts."""
    masks = [0] * len(before)
    for task in order:
        mask = 0
        for other in before[task]:
            mask |= masks[other] | (1 << other)
        masks[task] = mask
    return masks


@lru_cache(maxsize=256)
def slices(total: int, parts: int) -> tuple[tuple[int, int], ...]:
    """(offset, size) of each part of an even cut, without empty parts; at least one part."""
    base, rest = divmod(total, parts)
    cut, offset = [], 0
    for part in range(parts):
        size = base + (part < rest)
        if size:
            cut.append((offset, size))
        offset += size
    return tuple(cut) or ((0, 0),)
