"""The timeline of a serial call that is one collective and its products."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from weft.fabric import _native
from weft.fabric.spans import span_of
from weft.plan.tasks import Copy, Matmul
from weft.timeline import COMMUNICATION, COMPUTE, Span, Timeline

if TYPE_CHECKING:
    from weft.fabric.host.collective_program import CollectiveProgram

_STAGE, _COPY, _SUM, _KEEP, _TERM = range(1, 6)
"""What a rank does in a collective, as native/job.h numbers it."""

Named = tuple[str, str, str]
"""The lane, the name and the kind of a span."""


def recorded(program: CollectiveProgram, call: int, tensors: dict[str, torch.Tensor]) -> Timeline:
    """Carries out a call that this rank has entered; returns its spans."""
    between, spans = program.between(tensors), list[Span]()
    if program.gathers:
        spans += _moved(program, program.exchange(call, tensors["x"], between, True))
        for number, (w, y) in enumerate(program.names):
            spans += _multiplied(program, between, tensors[w], tensors[y], number)
    else:
        spans += _multiplied(program, tensors["x"], tensors["w"], between, 0)
        spans += _moved(program, program.exchange(call, between, tensors["y"], True))
    return Timeline(tuple(spans), str(program.plan.schedule))


def _multiplied(
    program: CollectiveProgram, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, number: int
) -> list[Span]:
    start = time.monotonic_ns()
    program.multiply(a, b, c)
    end = time.monotonic_ns()
    plan, rank = program.plan, program.fabric.rank
    lane = plan.lanes.get((rank, COMPUTE), ())
    products = [task for task in lane if isinstance(task, Matmul)]  # of results that are not empty
    return [span_of(plan, t, rank, COMPUTE, start, end) for t in products[number : number + 1]]


def _moved(program: CollectiveProgram, job: _native.Job | None) -> list[Span]:
    """What came from each peer, and what this rank did with it."""
    if job is None:
        return []
    rank, plan = program.fabric.rank, program.plan
    copies = [task for task in plan.tasks if isinstance(task, Copy) and task.rank == rank]
    labels = {task.peer: task.label for task in copies}
    found: dict[Named, tuple[int, int, int]] = {}
    for act, peer, size, start, end in job.marks:
        name = _gathered(act, peer, rank, labels) if program.gathers else _sent(act, peer, program)
        if name is not None:
            before = found.get(name, (start, end, 0))
            found[name] = (min(before[0], start), max(before[1], end), before[2] + size)
    return [
        Span(rank, lane, task, kind, start / 1e9, end / 1e9, size)
        for (lane, task, kind), (start, end, size) in found.items()
    ]


def _gathered(act: int, peer: int, rank: int, labels: dict[int, str]) -> Named | None:
    """Rows that come before the products, by the names of the plan."""
    source = peer if act == _COPY else rank
    if act not in (_STAGE, _KEEP, _COPY) or source not in labels:
        return None
    return f"engine {source}", labels[source], COMMUNICATION


def _sent(act: int, peer: int, program: CollectiveProgram) -> Named | None:
    """Products that come from peers, their sums, and sums that come from peers."""
    rank, lane = program.fabric.rank, f"engine {peer}"
    if act == _TERM or (act == _COPY and not program.collective.kind.sums):
        return lane, f"y{rank} of {peer}", COMMUNICATION
    named = {
        _COPY: (lane, f"sum of {peer}", COMMUNICATION),
        _SUM: (COMPUTE, "sum", "reduce"),
        _STAGE: (COMPUTE, "send", "permute"),
        _KEEP: (COMPUTE, "keep", "permute"),
    }
    return named.get(act)
