"""Proves a plan correct for all ranks together, before anything runs:

- no deadlock: dependencies and lane queues together have no cycle;
- no race: no region is written while another task may read or write it;
- every output element is computed exactly once, from the right inputs;
- every remote element that is needed is moved exactly once;
- the plan uses as much workspace as it states.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from weft.errors import InvalidPlan, Unsupported
from weft.plan.contents import trace
from weft.plan.order import ancestors, predecessors, topological
from weft.plan.tasks import AnyTask, Copy, KernelTiles, Matmul, Permute, Plan, Reduce, Region

MAX_TASKS = 30_000
"""The order of tasks is kept as a square matrix of bits. Beyond this size it takes seconds."""


def verify(plan: Plan) -> None:
    """Raises `InvalidPlan` with the reason unless the plan is correct."""
    if len(plan.tasks) > MAX_TASKS:
        raise Unsupported(
            f"{plan.schedule} cuts too fine: it makes {len(plan.tasks)} tasks, and a plan may have "
            f"{MAX_TASKS}; use a smaller depth"
        )
    _check_shapes(plan)
    _check_workspace(plan)
    before = predecessors(plan)
    order = topological(plan, before)
    masks = ancestors(order, before)
    _check_races(plan, masks)
    _check_arrivals(plan, masks)
    _check_moves(plan)
    plan.operation.check(plan, trace(plan, order))


def _check_shapes(plan: Plan) -> None:
    buffers = plan.buffer
    for number, task in enumerate(plan.tasks):
        if task.id != number or any(not 0 <= other < len(plan.tasks) for other in task.after):
            raise InvalidPlan(
                f"{task.label!r} has a wrong id, or waits for a task that is not there"
            )
        writes = task.writes()
        for region in (*task.reads(), *writes):
            buffer = buffers.get(region[:2])
            if buffer is None:
                raise InvalidPlan(
                    f"{task.label!r} of rank {task.rank} uses {region}: no such buffer"
                )
            inside = (
                0 <= region.row <= region.row + region.rows <= buffer.rows
                and 0 <= region.column <= region.column + region.columns <= buffer.columns
            )
            if not inside:
                raise InvalidPlan(
                    f"{task.label!r} of rank {task.rank} uses {region}: out of bounds"
                )
        for region in writes:
            if buffers[region[:2]].kind == "input":
                raise InvalidPlan(f"{task.label!r} of rank {task.rank} writes the input {region}")
        if not _fits(task):
            raise InvalidPlan(f"{task.label!r} of rank {task.rank} has regions of unequal shape")
        if isinstance(task, Copy):
            dtypes = {plan.buffer[region.key].dtype for region in (*task.reads(), *task.writes())}
            if len(dtypes) > 1:
                raise InvalidPlan(
                    f"{task.label!r} of rank {task.rank} copies {' to '.join(sorted(dtypes))}: "
                    "an engine moves bytes and cannot change their dtype"
                )


def _fits(task: AnyTask) -> bool:
    if isinstance(task, Matmul):
        a, b, c = task.a, task.b, task.c
        rows, inner = (a.columns, a.rows) if task.transposed else (a.rows, a.columns)
        return inner == b.rows and rows == c.rows and b.columns == c.columns
    if isinstance(task, KernelTiles):
        return all(
            (p.a.rows, p.a.columns, p.b.columns) == (p.c.rows, p.b.rows, p.c.columns)
            for p in task.parts
        )
    if isinstance(task, Reduce):
        shapes = {(r.rows, r.columns) for r in (*task.sources, *task.targets)}
        return len(shapes) == 1 and bool(task.sources) and bool(task.targets)
    pairs = zip(task.reads(), task.writes(), strict=True)
    return all((s.rows, s.columns) == (t.rows, t.columns) for s, t in pairs)


def _check_workspace(plan: Plan) -> None:
    needed = [0] * plan.operation.world
    for buffer in plan.buffers:
        if buffer.kind == "workspace":
            needed[buffer.rank] += buffer.num_bytes
    for rank, (promised, bytes_needed) in enumerate(zip(plan.workspace, needed, strict=True)):
        if promised != bytes_needed:
            raise InvalidPlan(
                f"workspace: rank {rank} needs {bytes_needed} bytes, the plan promised {promised}"
            )


def _check_races(plan: Plan, masks: Sequence[int]) -> None:
    writes: dict[tuple[int, str], list[tuple[int, Region]]] = {}
    reads: dict[tuple[int, str], list[tuple[int, Region]]] = {}
    for task in plan.tasks:
        for region in task.writes():
            writes.setdefault(region[:2], []).append((task.id, region))
        for region in task.reads():
            reads.setdefault(region[:2], []).append((task.id, region))
    for key, written in writes.items():
        others = [*written, *reads.get(key, [])]
        for i, j in _overlaps([r for _, r in written], [r for _, r in others]):
            first, second = written[i][0], others[j][0]
            if first == second or masks[second] >> first & 1 or masks[first] >> second & 1:
                continue
            one, two = plan.tasks[first], plan.tasks[second]
            raise InvalidPlan(
                f"race: {one.label!r} of rank {one.rank} writes {written[i][1]} while "
                f"{two.label!r} of rank {two.rank} may use it"
            )
        _check_repeats(plan, key, written)


def _check_repeats(plan: Plan, key: tuple[int, str], written: list[tuple[int, Region]]) -> None:
    """Raises unless every output is written once, and after that only accumulated to."""
    if plan.buffer[key].kind != "output":
        return
    whole = [(t, r) for t, r in written if not _accumulates(plan.tasks[t])]
    for i, j in _overlaps([r for _, r in whole], [r for _, r in whole]):
        if i < j:
            one, two = plan.tasks[whole[i][0]], plan.tasks[whole[j][0]]
            raise InvalidPlan(
                f"double write: {one.label!r} and {two.label!r} of rank {two.rank} both write "
                f"{whole[j][1]}"
            )


def _check_arrivals(plan: Plan, masks: Sequence[int]) -> None:
    """Raises unless a rank waits for what the compute of its peers stores into its outputs.

    Pushed copies need no such wait: they end a collective, which waits for all engines.
    """
    known = [0] * plan.operation.world
    for task in plan.tasks:
        known[task.rank] |= masks[task.id]
    for task in plan.tasks:
        if isinstance(task, Copy):
            continue
        for region in task.writes():
            away = region.rank != task.rank and plan.buffer[region.key].kind == "output"
            if away and not known[region.rank] >> task.id & 1:
                raise InvalidPlan(
                    f"{task.label!r} of rank {task.rank} stores {region}, and nobody waits for it"
                )


def _accumulates(task: AnyTask) -> bool:
    return isinstance(task, Matmul) and task.accumulate


def _check_moves(plan: Plan) -> None:
    """Raises if a rank moves the same element of another rank twice, or writes a sum to another
    rank, unless the kernel itself sends it."""
    moved: dict[tuple[int, int, str], list[Region]] = {}
    for task in plan.tasks:
        if isinstance(task, Permute) and any(r.rank != task.rank for r in task.reads()):
            raise InvalidPlan(f"{task.label!r} of rank {task.rank} permutes another rank's memory")
        sums_there = isinstance(task, Reduce) and any(r.rank != task.rank for r in task.targets)
        if sums_there and not plan.one_launch:
            raise InvalidPlan(f"{task.label!r} of rank {task.rank} sums into another rank's memory")
        if isinstance(task, Copy):
            for start, end in zip(task.reads(), task.writes(), strict=True):
                if start.rank != end.rank:
                    moved.setdefault((end.rank, *start.key), []).append(start)
    for (rank, source, buffer), regions in moved.items():
        for i, j in _overlaps(regions, regions):
            if i < j:
                raise InvalidPlan(
                    f"double move: rank {rank} moves {regions[j]} twice from {buffer}@{source}"
                )


def _overlaps(left: Sequence[Region], right: Sequence[Region]) -> Iterator[tuple[int, int]]:
    """Pairs (i, j) of regions that share an element.

    Regions are sorted by row and compared with their neighbours only. The few regions that are much
    taller than the rest (a local shard among chunks) have many neighbours, so they are compared
    separately.
    """
    heights = sorted(region.rows for region in right)
    tall = 4 * heights[len(heights) // 2] if heights else 0
    for members in (
        [j for j, region in enumerate(right) if region.rows <= tall],
        [j for j, region in enumerate(right) if region.rows > tall],
    ):
        if not members:
            continue
        members.sort(key=lambda j: right[j].row)
        starts = [right[j].row for j in members]
        tallest = max(right[j].rows for j in members)
        for i, a in enumerate(left):
            low = bisect_left(starts, a.row - tallest + 1)
            high = bisect_left(starts, a.row + a.rows)
            for j in members[low:high]:
                b = right[j]
                rows = a.rows and b.rows and a.row < b.row + b.rows
                if rows and a.column < b.column + b.columns and b.column < a.column + a.columns:
                    yield i, j
