"""Runs a plan in plain numpy, in any order that its dependencies allow. This defines what a plan
means.

Tests use it to check lowerings against a matrix product. It also shows what a plan does without
processes, engines or torch.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from weft.plan.order import predecessors, topological
from weft.plan.tasks import KernelTiles, Matmul, Plan, Reduce, Region

Array = npt.NDArray[np.float64]


def interpret(
    plan: Plan, inputs: Mapping[tuple[int, str], Array], seed: int = 0
) -> dict[tuple[int, str], Array]:
    """The output buffers by (rank, name), after the tasks have run in a random allowed order.

    Memory starts as NaN, so that a read of unwritten memory shows in the result.
    """
    memory = {
        (b.rank, b.name): np.array(inputs[(b.rank, b.name)], dtype=np.float64)
        if b.kind in ("input", "inplace")
        else np.full((b.rows, b.columns), np.nan)
        for b in plan.buffers
    }

    def view(region: Region) -> Array:
        rows = slice(region.row, region.row + region.rows)
        return memory[region.key][rows, region.column : region.column + region.columns]

    choice = random.Random(seed)
    order = topological(
        plan, predecessors(plan), lambda ready: ready.pop(choice.randrange(len(ready)))
    )
    for index in order:
        task = plan.tasks[index]
        if isinstance(task, Matmul):
            a = view(task.a)
            product = (a.T if task.transposed else a) @ view(task.b)
            view(task.c)[...] = view(task.c) + product if task.accumulate else product
            continue
        if isinstance(task, KernelTiles):
            for part in task.parts:
                view(part.c)[...] = view(part.a) @ view(part.b)
            continue
        if isinstance(task, Reduce):
            total = sum((view(source) for source in task.sources[1:]), view(task.sources[0]).copy())
            for target in task.targets:
                view(target)[...] = total
            continue
        values = [view(source).copy() for source in task.reads()]
        for target, value in zip(task.writes(), values, strict=True):
            view(target)[...] = value
    results = ("output", "inplace")
    return {(b.rank, b.name): memory[(b.rank, b.name)] for b in plan.buffers if b.kind in results}
