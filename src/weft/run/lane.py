"""Runs the compute lane of a plan on a flight, and decides which task runs next.

Tasks run in the order of the plan. Loose tasks (the adaptive policy, `plan.adaptive`) run as soon
as their inputs have arrived, matmuls in as few GEMMs as possible.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.fabric.interface import StepFlight
from weft.plan.adaptive import Loose, as_one, largest_run, merged, next_run
from weft.plan.tasks import AnyTask, Plan
from weft.run.compute import execute
from weft.timeline import COMPUTE


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tasks that run as soon as they are ready. needs: the dependencies of a task in the
    stretch."""

    tasks: dict[int, Loose]
    needs: dict[int, frozenset[int]]


Part = AnyTask | Stretch


def parts_of(plan: Plan, rank: int) -> list[Part]:
    """The compute lane of a rank, in the order in which it runs: single tasks, and stretches of
    loose tasks. Loose tasks without waits are ready together, so their GEMMs are determined
    here."""
    runs: list[AnyTask | list[AnyTask]] = []
    for task in plan.lanes.get((rank, COMPUTE), ()):
        if not task.loose:
            runs.append(task)
        elif runs and isinstance(runs[-1], list):
            runs[-1].append(task)
        else:
            runs.append([task])
    parts: list[Part] = []
    for run in runs:
        if not isinstance(run, list):
            parts.append(run)
        elif any(_waits_or_signals(plan, task) for task in run):
            parts.append(_stretch(plan, run))
        else:
            parts.extend(_pieces(run))
    return parts


def _waits_or_signals(plan: Plan, task: AnyTask) -> bool:
    tasks = plan.tasks
    return task.id in plan.signals or any(
        tasks[before].loose or (tasks[before].rank, tasks[before].lane) != (task.rank, task.lane)
        for before in task.after
    )


def _stretch(plan: Plan, tasks: Sequence[AnyTask]) -> Stretch:
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


def run_lane(
    parts: Sequence[Part], flight: StepFlight, tensors: dict[str, torch.Tensor], record: bool
) -> None:
    """Runs a compute lane to its end."""
    more = tensors.get("bags", tensors.get("scales"))
    timed = record or flight.paced
    for part in parts:
        if isinstance(part, Stretch):
            _run_stretch(part, flight, more, record)
        else:
            flight.before(part)
            if timed:
                _run_timed(part, flight, more, record)
            else:
                execute(part, flight.view, more)
            flight.after(part)


def _run_timed(task: AnyTask, flight: StepFlight, more: Any, record: bool) -> None:
    start = time.monotonic_ns()
    execute(task, flight.view, more)
    if flight.paced:
        flight.touched(task, start)
    if record:
        flight.ran(task, start, time.monotonic_ns())


def _run_stretch(stretch: Stretch, flight: StepFlight, more: Any, record: bool) -> None:
    timed = record or flight.paced
    waiting = dict(stretch.tasks)
    left = set(waiting)
    ready: dict[int, Loose] = {}
    while left:
        _collect(stretch, waiting, left, ready, flight)
        if not ready:
            flight.wait_any(next(iter(waiting.values())))
            continue
        run = next_run(list(ready.values()))
        for task in run:
            del ready[task.id]
        if timed:
            _run_timed(as_one(run), flight, more, record)
        else:
            execute(as_one(run), flight.view, more)
        for task in run:
            left.discard(task.id)
            flight.after(task)


def _collect(
    stretch: Stretch,
    waiting: dict[int, Loose],
    left: set[int],
    ready: dict[int, Loose],
    flight: StepFlight,
) -> None:
    """Moves the tasks that may run now from `waiting` to `ready`."""
    needs = stretch.needs
    tasks = [task for task in waiting.values() if not needs[task.id] & left]
    for task, may_run in zip(tasks, flight.ready(tasks), strict=True):
        if may_run:
            del waiting[task.id]
            ready[task.id] = task
