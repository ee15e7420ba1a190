"""A plan of one launch as native steps: the whole compute lane runs in a single native call,
without Python between its tasks.

The native kernels multiply few rows, pool embedding bags and add. Products of more rows in float32
are made by torch between the native steps, because its GEMM is faster there. Plans that need more
(float64, sums of many rows in half precision) run task by task (`engine_program`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch

from weft.dtype import DTYPES, kernel_numbers
from weft.fabric import _native
from weft.fabric.deadlines import nanoseconds
from weft.fabric.host.bags import Bags
from weft.fabric.host.engine_program import EngineProgram, counters_of
from weft.fabric.host.opening import kernels
from weft.fabric.host.packing import packed
from weft.fabric.host.process_call import ProcessCall, break_off, place
from weft.fabric.host.process_flight import UNRECORDED, Ended
from weft.fabric.host.product_repeat import (
    BUFFERS,
    SLOTS,
    ManyRowsRepeat,
    ProductRepeat,
    make_products,
)
from weft.fabric.interface import Disagree, Exposed
from weft.fabric.outcomes import DISAGREE, OK, OUTSIDE
from weft.fabric.proposal import Proposal
from weft.fabric.spans import span_of
from weft.plan.tasks import AnyTask, Await, KernelTiles, Lookup, Plan, Reduce, Region
from weft.timeline import COMPUTE, Timeline

if TYPE_CHECKING:
    from weft.fabric.processes import ProcessFabric

MOST_ROWS = 32
"""With more rows, torch's GEMM is faster."""

_PRODUCTS, _BAGS, _WAIT, _OUTSIDE = 0, 1, 3, 4
_TYPES = kernel_numbers()


def is_native(plan: Plan) -> bool:
    """Whether the native kernels can run the whole plan."""
    dtype = DTYPES.get(plan.operation.dtype)
    if not plan.one_launch or dtype is None or dtype.kernel is None or not dtype.operators:
        return False
    return all(
        isinstance(task, Lookup | Reduce | Await)
        or (isinstance(task, KernelTiles) and _is_summed(task, plan.operation.dtype == "float32"))
        for task in plan.tasks
    )


def _is_summed(task: KernelTiles, any_rows: bool) -> bool:
    """Whether all products are parts of sums, as native products are, and have few rows, unless
    torch can make them for any number of rows."""
    if _has_many_rows(task) and not any_rows:
        return False
    return all(part.c.buffer in ("inbox", "partial") for part in task.parts)


def _has_many_rows(task: AnyTask) -> bool:
    return isinstance(task, KernelTiles) and any(part.c.rows > MOST_ROWS for part in task.parts)


_NEEDS = "what 'slices of peers' needs"


class KernelProgram(EngineProgram):
    """A plan compiled for one rank, as one native kernel."""

    computes = False

    def __init__(
        self, plan: Plan, fabric: ProcessFabric, slots: Sequence[str], signatures: Sequence[int]
    ) -> None:
        super().__init__(plan, fabric, slots, signatures)
        self.layout = ([b.name for b in self.buffers], list(slots))
        self.lane = plan.lanes.get((fabric.rank, COMPUTE), ())
        self.variant = kernels()
        self.kernel = _native.Kernel(cast(int, DTYPES[plan.operation.dtype].kernel))
        self.quick = "bags" in self.layout[0]  # a known product is repeated (`repeat`)
        self._known: tuple[Proposal, _native.Repeat] | None = None
        self.outside = any(map(_has_many_rows, self.lane))
        """Whether torch makes the products."""
        counters = counters_of(plan, self.places)
        for task in self.lane:
            self._add(task, counters)

    def _add(self, task: AnyTask, counters: Mapping[int, tuple[int, int]]) -> None:
        waits = self.waits_of(task, counters)
        counter = counters[task.id][1] if task.id in counters else -1
        if isinstance(task, Reduce):
            first = task.targets[0]
            sources, targets = map(self.end_of, task.sources), map(self.end_of, task.targets)
            self.kernel.add_sum(
                list(sources), list(targets), first.rows, first.columns, waits, counter
            )
        elif isinstance(task, KernelTiles):
            products = [self._piece(p.a.row, p.b.column, p.c) for p in task.parts]
            work = _OUTSIDE if _has_many_rows(task) else _PRODUCTS
            self.kernel.add_pieces(work, products, waits, counter)
        elif isinstance(task, Lookup):
            pairs = zip(task.sources, task.targets, strict=True)
            bags = [self._piece(source.row, source.column, target) for source, target in pairs]
            self.kernel.add_pieces(_BAGS, bags, waits, counter)
        else:
            self.kernel.add_pieces(_WAIT, [], waits, counter)

    def _piece(self, first: int, column: int, target: Region) -> _native.Piece:
        return (first, column, target.rows, target.columns, self.end_of(target))

    def start(  # type: ignore[override]
        self, call: ProcessCall, tensors: dict[str, torch.Tensor], record: bool
    ) -> KernelFlight:
        call.label = self.label
        self.add_workspace(call.shared, tensors)
        if "w" in tensors and not self.outside:
            tensors["w"] = packed(tensors["w"])[0]
        return KernelFlight(self, call.number, tensors, record)

    def once(self, proposal: Proposal, tensors: dict[str, torch.Tensor], exposed: Exposed) -> bool:
        """One call of lookups."""
        fabric = self.fabric
        known = self._known_call(proposal)
        number = fabric.next_call()
        try:
            placed = place(fabric, exposed, number, proposal)
            outcome = known.pool(
                fabric.heap,
                number,
                nanoseconds(fabric.deadline),
                cast(Bags, tensors["bags"]).native,
                [tensors[name].data_ptr() for name in self.layout[0]],
                placed.offsets,
                torch.get_num_threads(),
            )
            if outcome[0] != OK:
                outcome = fabric.wait(known.go, self.label, _NEEDS, outcome)
            if outcome[0] not in (OK, DISAGREE):
                raise fabric.failure(outcome, self.label, _NEEDS)
        except BaseException as error:
            break_off(fabric, number, error)
            raise
        return outcome[0] != DISAGREE

    def _known_call(self, proposal: Proposal) -> _native.Repeat:
        """The native call with this rank's header. A program nearly always has the same."""
        if self._known is None or self._known[0] is not proposal:
            blob, signature = proposal.blob, proposal.signature
            call = _native.Repeat(self.kernel, self.variant, signature, blob, self.signatures, 0)
            self._known = proposal, call
        return self._known[1]

    def repeat(self, proposal: Proposal) -> ProductRepeat | None:
        buffers, slots = self.layout
        if buffers != BUFFERS or slots != (SLOTS if self.fabric.world > 1 else []):
            return None
        return (ManyRowsRepeat if self.outside else ProductRepeat)(self, proposal)


class KernelFlight:
    """One call of a kernel program. The kernel runs in `end`."""

    paced = False

    def __init__(
        self, program: KernelProgram, call: int, tensors: dict[str, torch.Tensor], record: bool
    ) -> None:
        fabric = program.fabric
        self._program, self._record = program, record
        self._call, self._tensors = call, tensors
        self._run = _native.KernelRun(
            fabric.heap,
            program.kernel,
            program.variant,
            call,
            fabric.deadline_ns(),
            [tensors[b.name].data_ptr() for b in program.buffers],
            program.signatures,
            _operands(tensors),
            record,
        )

    def end(self) -> Ended:
        program, run, tensors = self._program, self._run, self._tensors
        lane = program.lane
        outcome = run.go()
        while outcome[0] not in (OK, DISAGREE):
            at = run.at
            if outcome[0] == OUTSIDE:
                parts, own = cast(KernelTiles, lane[at]).parts, tensors["partial"]
                make_products(program, self._call, parts, tensors["x"], tensors["w"], own)
                outcome = run.go()
            else:
                label = lane[at].label if at < len(lane) else "the end of the call"
                waiting_for = f"what {label!r} needs"
                outcome = program.fabric.wait(run.go, program.label, waiting_for, outcome)
        if outcome[0] == DISAGREE:
            raise Disagree
        if not self._record:
            return UNRECORDED
        plan, rank = program.plan, program.fabric.rank
        spans = [
            span_of(plan, task, rank, COMPUTE, start, end)
            for task, (start, end) in zip(program.lane, run.spans, strict=True)
        ]
        return Ended(Timeline(tuple(spans), str(plan.schedule)))

    def cancel(self) -> None:
        """Does nothing: when `end` has raised, the kernel has stopped."""


def _operands(tensors: Mapping[str, torch.Tensor]) -> _native.Operands:
    """The operands of the kernel: addresses, types and strides."""
    operands = _native.Operands()
    operands.threads = torch.get_num_threads()
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
        _TYPES[w.dtype],
        transposed,
        w.stride(1 if transposed else 0) * w.element_size(),
        w.shape[0],
        0 if scale is None else scale.data_ptr(),
    )
    return operands
