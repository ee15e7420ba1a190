"""The order in which all ranks enqueue the tasks of a plan on the streams of a device.

Streams may share hardware queues, and then a wait at the head of a queue holds up everything that
was enqueued behind it. Every rank enqueues its tasks in one order of the whole plan in which each
task comes after all that it needs. Then the first unfinished task of that order is at the head of
its queue, and everything it needs has ended. So the plan ends whatever streams share a queue.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.errors import InvalidPlan
from weft.plan.order import predecessors, topological
from weft.plan.tasks import Plan


def issue_order(plan: Plan) -> tuple[int, ...]:
    """All tasks in the order in which they are enqueued, the same on every rank. Lanes advance side
    by side: the next task is the one that has the fewest tasks ahead of it in its lane."""
    ahead = {task.id: place for queue in plan.lanes.values() for place, task in enumerate(queue)}

    def pick(ready: list[int]) -> int:
        return ready.pop(min(range(len(ready)), key=lambda i: (ahead[ready[i]], ready[i])))

    return tuple(topological(plan, predecessors(plan), pick))


def check_issue_order(plan: Plan, order: Sequence[int]) -> None:
    """Raises `InvalidPlan` unless `order` has every task once, after all that it needs."""
    place = {task: index for index, task in enumerate(order)}
    if sorted(order) != list(range(len(plan.tasks))):
        raise InvalidPlan("issue order: it must have every task of the plan once")
    for task, before in enumerate(predecessors(plan)):
        for other in before:
            if place[other] > place[task]:
                first, second = plan.tasks[task], plan.tasks[other]
                raise InvalidPlan(
                    f"issue order: {first.label!r} of rank {first.rank} is enqueued before "
                    f"{second.label!r} of rank {second.rank}, which it needs"
                )
