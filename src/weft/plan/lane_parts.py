"""The order of a rank's compute lane: single tasks, and stretches of loose tasks, which run as soon
as they are ready (`plan.adaptive`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from weft.plan.adaptive import Loose, largest_run, merged
from weft.plan.tasks import AnyTask, Plan
from weft.timeline import COMPUTE


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tasks that run as soon as they are ready. needs: the dependencies of a task in the
    stretch."""

    tasks: dict[int, Loose]
    needs: dict[int, frozenset[int]]


LanePart = AnyTask | Stretch


def parts_of(plan: Plan, rank: int) -> list[LanePart]:
    """The compute lane of a rank, in the order in which it runs. Loose tasks without waits are
    ready together, so their GEMMs are determined here."""
    runs: list[AnyTask | list[AnyTask]] = []
    for task in plan.lanes.get((rank, COMPUTE), ()):
        if not task.loose:
            runs.append(task)
        elif runs and isinstance(runs[-1], list):
            runs[-1].append(task)
        else:
            runs.append([task])
    parts: list[LanePart] = []
    for run in runs:
        if not isinstance(run, list):
            parts.append(run)
        elif any(_waits_or_signals(plan, task) for task in run):
            parts.append(_stretch(run))
        else:
            parts.extend(_pieces(run))
    return parts


def _waits_or_signals(plan: Plan, task: AnyTask) -> bool:
    tasks = plan.tasks
    return task.id in plan.signals or any(
        tasks[before].loose or (tasks[before].rank, tasks[before].lane) != (task.rank, task.lane)
        for before in task.after
    )


def _stretch(tasks: Sequence[AnyTask]) -> Stretch:
    loose: dict[int, Loose] = {task.id: task for task in tasks}  # type: ignore[misc]
    needs = {
        task.id: frozenset(before for before in task.after if before in loose) for task in tasks
    }
    return Stretch(loose, needs)


def _pieces(tasks: Sequence[AnyTask]) -> Iterable[AnyTask]:
    """The GEMMs into which the adaptive policy merges tasks that are all ready."""
    left: dict[int, Any] = {task.id: task for task in tasks}
    while left:
        run = largest_run(list(left.values()))
        for task in run:
            del left[task.id]
        yield merged(run)
