"""Checks whether all ranks of a plan do the same, shifted around the node. If so, one rank can
represent all.

Rank r mirrors rank 0 if its tasks, in their order, have the same kinds and sizes, touch the ranks
at the same distances, and wait for the same tasks of those ranks. Places in a buffer make no
difference, except for the adaptive policy, which merges adjacent chunks.
"""

from __future__ import annotations

from weft.plan.tasks import (
    AnyTask,
    Await,
    Copy,
    KernelTiles,
    Lookup,
    Matmul,
    Permute,
    Plan,
    Reduce,
    Region,
)


def ranks_of(plan: Plan) -> list[list[AnyTask]]:
    """The tasks of every rank, in plan order."""
    ranks: list[list[AnyTask]] = [[] for _ in range(plan.operation.world)]
    for task in plan.tasks:
        ranks[task.rank].append(task)
    return ranks


def is_symmetric(plan: Plan, ranks: list[list[AnyTask]]) -> bool:
    """Whether every rank mirrors rank 0."""
    world = len(ranks)
    if any(len(tasks) != len(ranks[0]) for tasks in ranks):
        return False
    place = [0] * len(plan.tasks)
    for tasks in ranks:
        for index, task in enumerate(tasks):
            place[task.id] = index
    wanted = [_signature(plan, task, ranks[0], place, world) for task in ranks[0]]
    return all(
        _signature(plan, task, tasks, place, world) == sought
        for tasks in ranks[1:]
        for task, sought in zip(tasks, wanted, strict=True)
    )


def _signature(
    plan: Plan, task: AnyTask, tasks: list[AnyTask], place: list[int], world: int
) -> tuple[object, ...]:
    rank = task.rank

    def size(region: Region) -> tuple[object, ...]:
        buffer = plan.buffer[region.key]
        whole = region.columns == buffer.columns
        return ((region.rank - rank) % world, region.rows, region.columns, buffer.dtype, whole)

    after = sorted(((plan.tasks[other].rank - rank) % world, place[other]) for other in task.after)
    if isinstance(task, Copy):
        lane = (task.peer - rank) % world
        ends = (size(task.source), size(task.target), *map(size, task.also))
        return (task.kind, after, *ends, task.engine, lane, task.swaps, task.prelaunched)
    if isinstance(task, Permute):
        return (task.kind, after, *map(size, task.sources), *map(size, task.targets))
    if isinstance(task, Reduce):
        parts = (*map(size, task.sources), *map(size, task.targets))
        return (task.kind, after, task.early, len(task.sources), *parts)
    if isinstance(task, Lookup):
        parts = (*map(size, task.sources), *map(size, task.targets))
        return (task.kind, after, task.pooling, *parts)
    if isinstance(task, KernelTiles | Await):
        return (task.kind, after, *map(size, task.reads()), *map(size, task.writes()))
    merging: tuple[object, ...] = ()
    if task.merge is not None:
        first = next(t for t in tasks if isinstance(t, Matmul) and t.merge == task.merge)
        merging = (
            task.merge,
            task.a.row - first.a.row,
            task.c.row - first.c.row,
            task.a.buffer == first.a.buffer,
        )
    shape = (*map(size, (task.a, task.b, task.c)), task.accumulate, task.transposed)
    return (task.kind, after, *shape, merging)
