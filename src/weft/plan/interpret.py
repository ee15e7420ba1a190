"""Runs a plan in plain numpy, in any order that its dependencies allow: the meaning of a plan.

Used by tests to check lowerings against a matrix product, and by anyone who wants to see what a
plan does without processes, engines or torch.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from weft.plan.order import predecessors
from weft.plan.tasks import Matmul, Plan, Reduce, Region

Array = npt.NDArray[np.float64]


def interpret(
    plan: Plan, inputs: Mapping[tuple[int, str], Array], seed: int = 0
) -> dict[tuple[int, str], Array]:
    """The output buffers by (rank, name), after the tasks ran in a random allowed order.

    Memory that nothing has written is NaN, so that reading it shows.
    """
    memory = {
        (b.rank, b.name): np.array(inputs[(b.rank, b.name)], dtype=np.float64)
        if b.kind == "input"
        else np.full((b.rows, b.columns), np.nan)
        for b in plan.buffers
    }

    def view(region: Region) -> Array:
        rows = slice(region.row, region.row + region.rows)
        return memory[region.key][rows, region.column : region.column + region.columns]

    for index in _random_order(plan, random.Random(seed)):
        task = plan.tasks[index]
        if isinstance(task, Matmul):
            a = view(task.a)
            product = (a.T if task.transposed else a) @ view(task.b)
            view(task.c)[...] = view(task.c) + product if task.accumulate else product
            continue
        if isinstance(task, Reduce):
            total = sum((view(source) for source in task.sources[1:]), view(task.sources[0]).copy())
            for target in task.targets:
                view(target)[...] = total
            continue
        values = [view(source).copy() for source in task.reads()]
        for target, value in zip(task.writes(), values, strict=True):
            view(target)[...] = value
    return {(b.rank, b.name): memory[(b.rank, b.name)] for b in plan.buffers if b.kind == "output"}


def _random_order(plan: Plan, choice: random.Random) -> list[int]:
    before = predecessors(plan)
    waiting = [len(tasks) for tasks in before]
    followers: list[list[int]] = [[] for _ in before]
    for task, tasks in enumerate(before):
        for other in tasks:
            followers[other].append(task)
    ready = [task for task, count in enumerate(waiting) if count == 0]
    order = []
    while ready:
        task = ready.pop(choice.randrange(len(ready)))
        order.append(task)
        for follower in followers[task]:
            waiting[follower] -= 1
            if waiting[follower] == 0:
                ready.append(follower)
    return order
