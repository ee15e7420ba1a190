"""Runs the compute lane of a plan on a flight, task by task.

Tasks run in the order of `plan.lane_parts`. Loose tasks run as soon as their inputs have arrived,
matmuls in as few GEMMs as possible.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from weft.fabric.interface import StepFlight
from weft.plan.adaptive import Loose, as_one, next_run
from weft.plan.lane_parts import LanePart, Stretch
from weft.plan.tasks import AnyTask
from weft.run.compute import execute


def run_lane(
    parts: Sequence[LanePart], flight: StepFlight, tensors: dict[str, torch.Tensor], record: bool
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
