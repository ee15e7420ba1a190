"""Runs a plan that is one launch a rank: natively, its whole compute lane in a single call without
Python between its tasks, or task by task where the native kernels cannot do it (products of many
rows, float64).

The plan says what is computed, where it is stored and what waits for what, as for any other. On a
paced link, compute goes on while what it stored is under way, and says that it is there when the
link has brought it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import cast

import torch

from weft.fabric import HostFabric, _native
from weft.fabric.outcomes import DISAGREE, OK
from weft.plan.tasks import Await, Lookup, Plan, Reduce, Region, Tiles
from weft.run.bags import TYPES, Bags
from weft.run.executor import NOTHING, Run, Runner, Step, counters_of, span_of
from weft.timeline import COMPUTE, Timeline

MOST_ROWS = 32
"""Beyond so many rows torch's GEMM is the better one."""

_PRODUCTS, _BAGS, _WAIT = 0, 1, 3
_TYPES = {str(dtype).removeprefix("torch."): number for dtype, number in TYPES.items()}


def is_native(plan: Plan) -> bool:
    """Whether the native kernels can do all of the plan."""
    if not plan.one_launch or _TYPES.get(plan.operation.dtype, 3) == 3:
        return False
    return all(
        isinstance(task, Lookup | Reduce | Await)
        or (isinstance(task, Tiles) and _summed(plan, task))
        for task in plan.tasks
    )


def _summed(plan: Plan, task: Tiles) -> bool:
    """Whether products are of few rows and go into sums, which native ones are."""
    return all(p.c.rows <= MOST_ROWS and p.c.buffer in ("inbox", "partial") for p in task.parts)


def runner_of(
    plan: Plan,
    fabric: HostFabric,
    signatures: Sequence[int],
    slots: Sequence[str],
    why: str = "",
) -> Runner:
    """The runner that suits a plan."""
    kind = KernelRunner if is_native(plan) else TaskRunner if plan.one_launch else Runner
    return kind(plan, fabric, signatures, slots, why)


class _Storing(Run):
    """One call, task by task; what is on its way to peers does not hold up compute."""

    __slots__ = ("due", "under_way")

    def __init__(
        self, runner: Runner, call: int, tensors: dict[str, torch.Tensor], record: bool
    ) -> None:
        super().__init__(runner, call, tensors, record)
        self.due = 0
        self.under_way: list[tuple[int, Step]] = []

    def pace(self, until: int, region: Region) -> None:
        self.due = max(self.due, until)

    def signal(self, step: Step) -> None:
        if self.due and step.counter >= 0:
            self.under_way.append((self.due, step))
        else:
            super().signal(step)
        self.due = 0
        while self.under_way and self.under_way[0][0] <= _native.now_ns():
            super().signal(self.under_way.pop(0)[1])

    def wait_for(self, step: Step) -> None:
        self._deliver()
        super().wait_for(step)

    def finish(self) -> None:
        self._deliver()
        super().finish()

    def _deliver(self) -> None:
        """Whoever waits first lets go what its peers may wait for."""
        while self.under_way:
            until, step = self.under_way.pop(0)
            self.hold(until, f"{step.task.label!r} to come through the link")
            super().signal(step)


class TaskRunner(Runner):
    """A plan of one launch, run task by task."""

    def start(self, call: int, tensors: dict[str, torch.Tensor], record: bool) -> Run:
        return _Storing(self, call, tensors, record)


class KernelRunner(Runner):
    """A plan made ready for one rank, as native steps."""

    def __init__(
        self,
        plan: Plan,
        fabric: HostFabric,
        signatures: Sequence[int],
        slots: Sequence[str],
        why: str = "",
    ) -> None:
        super().__init__(plan, fabric, signatures, slots, why)
        self.places = ([b.name for b in self.buffers], list(slots))
        self._lane = plan.lanes.get((fabric.rank, COMPUTE), ())
        self.kernels = os.environ.get("WEFT_KERNELS", "")
        self.kernel = _native.Kernel(_TYPES[plan.operation.dtype])
        counters = counters_of(plan, self._places)
        for task in self._lane:
            waits = self._waits(task, counters)
            counter = counters[task.id][1] if task.id in counters else -1
            if isinstance(task, Reduce):
                first = task.targets[0]
                sources, targets = map(self._end, task.sources), map(self._end, task.targets)
                self.kernel.add_sum(
                    list(sources), list(targets), first.rows, first.columns, waits, counter
                )
            elif isinstance(task, Tiles):
                products = [self._piece(p.a.row, p.b.column, p.c) for p in task.parts]
                self.kernel.add_pieces(_PRODUCTS, products, waits, counter)
            elif isinstance(task, Lookup):
                pairs = zip(task.sources, task.targets, strict=True)
                bags = [self._piece(source.row, source.column, target) for source, target in pairs]
                self.kernel.add_pieces(_BAGS, bags, waits, counter)
            else:
                self.kernel.add_pieces(_WAIT, [], waits, counter)

    def _piece(self, first: int, column: int, target: Region) -> _native.Piece:
        return (first, column, target.rows, target.columns, self._end(target))

    def run(
        self,
        call: int,
        tensors: dict[str, torch.Tensor],
        shared: Mapping[str, torch.Tensor],
        record: bool,
    ) -> Timeline | None:
        self._complete(tensors, shared)
        fabric = self.fabric
        run = _native.KernelRun(
            fabric.native,
            self.kernel,
            self.kernels,
            call,
            fabric.deadline_ns(),
            [tensors[b.name].data_ptr() for b in self.buffers],
            self.signatures,
            _operands(tensors),
            record,
        )
        outcome = run.go()
        if outcome[0] != OK:
            at = run.at
            label = self._lane[at].label if at < len(self._lane) else "the end of the call"
            outcome = fabric.wait(run.go, self.label, f"what {label!r} needs", outcome)
        if outcome[0] == DISAGREE:
            return None
        if not record:
            return NOTHING
        spans = [
            span_of(self.plan, task, fabric.rank, COMPUTE, start, end)
            for task, (start, end) in zip(self._lane, run.spans, strict=True)
        ]
        return Timeline(tuple(spans), str(self.plan.schedule))


def _operands(tensors: Mapping[str, torch.Tensor]) -> _native.Operands:
    """What the kernel works on, as it lies in memory."""
    operands = _native.Operands()
    if "bags" in tensors:
        operands.set_bags(cast(Bags, tensors["bags"]).native)
        return operands
    x, w, scale = tensors["x"], tensors["w"], tensors.get("scale")
    transposed = w.stride(0) == 1 and w.shape[0] > 1
    operands.set_product(
        x.data_ptr(),
        x.shape[0],
        x.stride(0) * x.element_size(),
        w.data_ptr(),
        TYPES[w.dtype],
        transposed,
        w.stride(1 if transposed else 0) * w.element_size(),
        w.shape[0],
        0 if scale is None else scale.data_ptr(),
    )
    return operands
