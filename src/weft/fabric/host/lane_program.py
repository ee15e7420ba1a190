"""A plan whose compute lane runs in a single native call, without Python between its tasks.

torch makes the products (`native/torch_product.h`), and the policy for loose tasks is the same as
in `plan.adaptive`. A known call is one native call in all: it enters, starts its copies, runs its
lane and ends. Lanes with more than one dtype, and those with scales or bags, run task by task
(`engine_program`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn, cast

import torch

from weft.dtype import DTYPES, ON_HOST
from weft.fabric import _native
from weft.fabric.deadlines import nanoseconds
from weft.fabric.host.engine_program import Counter, EngineProgram, counters_of
from weft.fabric.host.process_call import (
    ProcessCall,
    break_off,
    place,
    wait_released,
)
from weft.fabric.host.process_flight import UNRECORDED, Ended, copy_spans, quiesce
from weft.fabric.interface import Disagree, Exposed
from weft.fabric.outcomes import AGAIN, CANCELLED, DISAGREE, OK, Outcome
from weft.fabric.proposal import Proposal
from weft.fabric.spans import span_of
from weft.plan.adaptive import Loose, as_one
from weft.plan.lane_parts import Stretch, parts_of
from weft.plan.tasks import AnyTask, Await, KernelTiles, Matmul, Permute, Plan, Reduce, Region
from weft.timeline import COMPUTE, Timeline

if TYPE_CHECKING:
    from weft.fabric.processes import ProcessFabric

_PRODUCTS, _SUM, _MOVES, _NOTHING = 0, 1, 2, 3


def runs_natively(plan: Plan, rank: int) -> bool:
    """Whether native code can run the compute lane of a rank: it multiplies, adds and moves, all in
    one dtype."""
    if not _native.has_torch_product():
        return False
    kinds = Matmul | Reduce | Permute | KernelTiles | Await
    dtypes = set()
    for task in plan.lanes.get((rank, COMPUTE), ()):
        if not isinstance(task, kinds):
            return False
        dtypes |= {plan.buffer[region.key].dtype for region in (*task.reads(), *task.writes())}
    scales = any(b.name.startswith("scale") for b in plan.buffers)
    dtype = plan.operation.dtype
    return dtypes == {dtype} and dtype in ON_HOST and not scales


class _Work(NamedTuple):
    """What a task computes: see `native/lane.h`."""

    duty: int
    a: Sequence[Region] = ()
    b: Sequence[Region] = ()
    c: Sequence[Region] = ()
    accumulate: bool = False
    transposed: bool = False


def _work_of(task: AnyTask) -> _Work:
    if isinstance(task, Matmul):
        return _Work(_PRODUCTS, [task.a], [task.b], [task.c], task.accumulate, task.transposed)
    if isinstance(task, KernelTiles):
        parts = task.parts
        return _Work(_PRODUCTS, [p.a for p in parts], [p.b for p in parts], [p.c for p in parts])
    if isinstance(task, Reduce):
        return _Work(_SUM, task.sources, (), task.targets)
    if isinstance(task, Permute):
        return _Work(_MOVES, task.sources, (), task.targets)
    return _Work(_NOTHING)


class LaneProgram(EngineProgram):
    """A plan compiled for one rank, with a native compute lane."""

    computes = False
    quick = True

    def __init__(
        self, plan: Plan, fabric: ProcessFabric, slots: Sequence[str], signatures: Sequence[int]
    ) -> None:
        super().__init__(plan, fabric, slots, signatures)
        dtype = DTYPES[plan.operation.dtype]
        assert dtype.channel is not None
        self.lane = _native.Lane(dtype.channel, dtype.bytes, plan.one_launch)
        self.names = [b.name for b in self.buffers]
        self.tasks: dict[int, AnyTask] = {}
        """The tasks of the lane by id. Those that are always ready together are one."""
        self._known: tuple[Proposal, _native.LaneCall] | None = None
        counters = counters_of(plan, self.places)
        at = 0
        for part in parts_of(plan, fabric.rank):
            tasks = list(part.tasks.values()) if isinstance(part, Stretch) else [part]
            places = {task.id: at + i for i, task in enumerate(tasks)}
            for task in tasks:
                needs = part.needs[task.id] if isinstance(part, Stretch) else ()
                self._add(task, counters, [places[before] for before in needs])
            self.lane.add_stretch(at, len(tasks), isinstance(part, Stretch))
            at += len(tasks)

    def _add(self, task: AnyTask, counters: Mapping[int, Counter], needs: Sequence[int]) -> None:
        self.tasks[task.id] = task
        signals, work = self.signals_of(task, counters), _work_of(task)
        merge = task.merge if isinstance(task, Matmul) else None
        self.lane.add(
            task.id,
            work.duty,
            self._areas(work.a),
            self._areas(work.b),
            self._areas(work.c),
            work.accumulate,
            work.transposed,
            signals.waits,
            signals.remote,
            signals.counter,
            signals.rings,
            -1 if merge is None else merge,
            needs,
        )

    def _areas(self, regions: Iterable[Region]) -> list[_native.Area]:
        """Regions for native code: place, buffer or slot, rows, columns, and columns in all."""
        return [
            (
                self.places[r.rank],
                self.number_of(r),
                r.row,
                r.rows,
                r.column,
                r.columns,
                self.plan.buffer[r.key].columns,
            )
            for r in regions
        ]

    def start(  # type: ignore[override]
        self, call: ProcessCall, tensors: dict[str, torch.Tensor], record: bool
    ) -> LaneFlight:
        call.label = self.label
        self.add_workspace(call.shared, tensors)
        return LaneFlight(self, call.number, tensors, record)

    def once(self, proposal: Proposal, tensors: dict[str, torch.Tensor], exposed: Exposed) -> bool:
        fabric = self.fabric
        known = self._known_call(proposal)
        number = fabric.next_call()
        try:
            placed = place(fabric, exposed, number, proposal)
            self.add_workspace(placed.shared, tensors)
            buffers = [tensors[name] for name in self.names]
            patience = nanoseconds(fabric.deadline)
            outcome = known.start(number, patience, buffers, placed.offsets)
            while outcome[0] == AGAIN:
                outcome = known.go()
            if outcome[0] != OK:
                self.stop(outcome, known.copies, known.at)
            if placed.in_place:
                wait_released(fabric, number, self.label)
        except Disagree:
            return False
        except BaseException as error:
            if known.copies is not None:
                quiesce(fabric.heap, known.copies)
            break_off(fabric, number, error)
            raise
        return True

    def _known_call(self, proposal: Proposal) -> _native.LaneCall:
        """The native call with this rank's header. A program nearly always has the same."""
        if self._known is None or self._known[0] is not proposal:
            call = _native.LaneCall(
                self.fabric.heap,
                self.lane,
                self.engines,
                proposal.signature,
                proposal.blob,
                self.signatures,
            )
            self._known = proposal, call
        return self._known[1]

    def stop(self, outcome: Outcome, copies: _native.Call | None, at: int) -> NoReturn:
        """Raises the error for which a lane could not go on, or `Disagree`. at: the id of the task
        that it had come to."""
        if outcome[0] in (DISAGREE, CANCELLED) and copies is not None:  # an engine knows why
            stopped = quiesce(self.fabric.heap, copies)
            if DISAGREE in (outcome[0], stopped[0]):
                raise Disagree
            outcome = stopped
        needed = "the end of the call" if at < 0 else repr(self.plan.tasks[at].label)
        raise self.fabric.failure(outcome, self.label, f"what {needed} needs")


class LaneFlight:
    """One call of a lane program. The lane runs in `end`."""

    __slots__ = ("_copies", "_program", "_record", "_run")

    def __init__(
        self, program: LaneProgram, call: int, tensors: dict[str, torch.Tensor], record: bool
    ) -> None:
        fabric = program.fabric
        buffers = [tensors[name] for name in program.names]
        self._program, self._record = program, record
        self._copies = fabric.reach.launch(
            program.engines, call, fabric.deadline_ns(), buffers, program.signatures, record
        )
        self._run = _native.LaneRun(fabric.heap, program.lane, self._copies, buffers)

    def end(self) -> Ended:
        run = self._run
        while (outcome := run.go())[0] == AGAIN:
            pass
        if outcome[0] != OK:
            self._program.stop(outcome, self._copies, run.at)
        return Ended(self._timeline()) if self._record else UNRECORDED

    def cancel(self) -> None:
        quiesce(self._program.fabric.heap, self._copies)

    def _timeline(self) -> Timeline:
        program, rank = self._program, self._program.fabric.rank
        plan, computed = program.plan, []
        for ids, start, end in self._run.spans:
            task = program.tasks[ids[0]]
            if len(ids) > 1:
                task = as_one([cast(Loose, program.tasks[one]) for one in ids])
            computed.append(span_of(plan, task, rank, COMPUTE, start, end))
        return Timeline((*computed, *copy_spans(plan, rank, self._copies)), str(plan.schedule))
