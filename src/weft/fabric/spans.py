"""The span of a task in the timeline of a call."""

from __future__ import annotations

from weft.plan.tasks import AnyTask, KernelTiles, Matmul, Plan
from weft.timeline import Span


def span_of(plan: Plan, task: AnyTask, rank: int, lane: str, start: int, end: int) -> Span:
    """The span of a task; start and end are in nanoseconds."""
    flops = task.num_flops if isinstance(task, KernelTiles) else 0
    if isinstance(task, Matmul):
        flops = 2 * task.c.num_elements * task.inner
    moved = sum(plan.num_bytes(r) for r in task.reads()) if not flops else 0
    return Span(rank, lane, task.label, task.kind, start / 1e9, end / 1e9, moved, flops)
