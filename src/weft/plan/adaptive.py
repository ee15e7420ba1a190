"""The adaptive policy, shared by the executor and the simulator.

Each time the compute lane is free, the policy looks at the tasks that are ready. A sum goes first:
it is short, and a peer may wait for it. Otherwise the policy takes the largest run of adjacent
chunks among the matmuls (adjacent rows in a and in c, the same b) and multiplies it as one GEMM:

    arrived   x1.0 x1.1 .... x1.3 | x2.0 ....     ->  one GEMM over x1.0 x1.1 (x1.3 x2.0 comes next)

So compute never waits for a fixed set of chunks, and never runs more GEMMs than it must.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, itemgetter

from weft.plan.tasks import Matmul, Reduce, Region

_row, _merge = attrgetter("c.row"), attrgetter("merge")


Loose = Matmul | Reduce
"""The tasks whose order the policy chooses."""


def next_run(ready: Sequence[Loose]) -> list[Loose]:
    """Chooses among the ready tasks: one sum, or matmuls to run as one GEMM."""
    sums = [task for task in ready if isinstance(task, Reduce)]
    if sums:
        return [min(sums, key=attrgetter("id"))]
    return list(largest_run([task for task in ready if isinstance(task, Matmul)]))


def as_one(run: Sequence[Loose]) -> Loose:
    """The run as a single task."""
    first = run[0]
    if isinstance(first, Reduce):
        return first
    return merged([task for task in run if isinstance(task, Matmul)])


def largest_run(ready: Sequence[Matmul]) -> list[Matmul]:
    """The run with the most rows, in row order. Of equal runs, the one with the lowest row in c.

    All tasks must have a `merge` and belong to one rank. Tasks with the same `merge` have the same
    b and c, and a run never contains tasks with different `merge`.
    """
    if len(ready) < 2:
        return list(ready)
    tasks = sorted(ready, key=_row)
    if len(set(map(_merge, tasks))) == 1:
        return _largest(tasks)[1]
    groups: dict[int | None, list[Matmul]] = {}
    for task in tasks:
        groups.setdefault(task.merge, []).append(task)
    return max(map(_largest, groups.values()), key=itemgetter(0))[1]


def _largest(tasks: list[Matmul]) -> tuple[int, list[Matmul]]:
    """The number of rows of the longest run, and the run. Tasks are sorted by row and share b."""
    best_rows, best_from, best_to = -1, 0, 0
    begin, rows, end_a, end_c, buffer, rank = 0, 0, -1, -1, "", -1
    for index, task in enumerate(tasks):
        a, row = task.a, task.c.row
        here, height = a.row, a.rows
        if row != end_c or here != end_a or a.buffer != buffer or a.rank != rank:
            begin, rows, buffer, rank = index, 0, a.buffer, a.rank
        rows += height
        end_a, end_c = here + height, row + height
        if rows > best_rows:
            best_rows, best_from, best_to = rows, begin, index + 1
    return best_rows, tasks[best_from:best_to]


def merged(run: Sequence[Matmul]) -> Matmul:
    """The run as one GEMM, which starts at the first task's row and has the rows of all tasks."""
    first = run[0]
    if len(run) == 1:
        return first
    a, c, last = first.a, first.c, run[-1].c
    rows = last.row + last.rows - c.row
    return Matmul(
        first.id,
        first.rank,
        first.after,
        f"{first.label} +{len(run) - 1}",
        Region(a.rank, a.buffer, a.row, rows, a.column, a.columns),
        first.b,
        Region(c.rank, c.buffer, c.row, rows, c.column, c.columns),
        first.accumulate,
        first.merge,
    )
