"""A serial plan as plain code has it: one GEMM for each weight, and one collective of the channel
before or after them.

Nothing is staged, and no engine is woken: the calling thread moves the bytes. Ranks enter and agree
as in any call, so that ranks that disagree raise before the collective begins. Products that are
sent are made in shared memory, where the channel reads them in place.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from weft.dtype import DTYPES, ITEM_BYTES, ON_HOST
from weft.errors import Unsupported
from weft.fabric import _native
from weft.fabric.deadlines import nanoseconds
from weft.fabric.host.process_call import ProcessCall
from weft.fabric.host.process_flight import UNRECORDED, Ended
from weft.fabric.interface import Disagree
from weft.fabric.outcomes import DISAGREE, OK
from weft.fabric.proposal import Proposal
from weft.fabric.spans import span_of
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.plan.all_to_all_matmul import AllToAllMatmul
from weft.plan.collective import KINDS, Kind
from weft.plan.matmul_all_reduce import MatmulAllReduce
from weft.plan.matmul_all_to_all import MatmulAllToAll
from weft.plan.matmul_reduce_scatter import MatmulReduceScatter
from weft.plan.tasks import Copy, Matmul, Plan
from weft.schedule import Schedule
from weft.timeline import COMMUNICATION, COMPUTE, Span, Timeline

if TYPE_CHECKING:
    from weft.fabric.processes import ProcessFabric

_FOREVER = 2**63 - 1
_EMPTY = 64
"""The address that stands for an empty tensor, which has none. Nothing is read there."""
_SUM = 0
_STAGE, _COPY, _REDUCE, _KEEP, _TERM = range(1, 6)
"""What a rank does in a collective, as native/job.h numbers it."""


class Exchange(NamedTuple):
    """The collective of a serial plan on one rank, in bytes. sizes: what all ranks know, empty if
    every pair of ranks has a size of its own. given and taken: this rank's pieces, one behind the
    other. each: the size of all pieces if they are equal, otherwise -1. gathers: whether it comes
    before the products. rows and columns: of what it makes for them, or gets from them."""

    kind: Kind
    sizes: tuple[int, ...]
    given: tuple[int, ...]
    taken: tuple[int, ...]
    each: int
    gathers: bool
    rows: int
    columns: int


def exchange_of(plan: Plan, rank: int) -> Exchange | None:
    """The one collective that carries out the communication of a plan; None if there is none."""
    op, schedule = plan.operation, plan.schedule
    if not isinstance(schedule, Schedule) or not schedule.serial or schedule.engine == "direct":
        return None
    if op.world == 1 or op.dtype not in ON_HOST or getattr(op, "experts", False):
        return None
    if getattr(op, "result", None) not in (None, op.dtype):
        return None
    item = ITEM_BYTES[op.dtype]
    if isinstance(op, AllGatherMatmul | AllToAllMatmul):
        rows = sum(rows for _, rows in op.spans(rank))
        if isinstance(op, AllToAllMatmul):
            return _by_pair(op.splits, op.k * item, rank, True, rows, op.k)
        sizes = tuple(own * op.k * item for own in op.rows)
        return _by_rank("all_gather", sizes, (sizes[rank],), sizes, rows, op.k)
    if isinstance(op, MatmulAllToAll):
        rows = sum(op.splits[rank])
        return _by_pair(op.splits, op.n * item, rank, False, rows, op.n)
    if isinstance(op, MatmulAllReduce):
        whole = (op.m * op.n * item,)
        return _by_rank("all_reduce", whole, whole, whole, op.m, op.n)
    if isinstance(op, MatmulReduceScatter):
        sizes = tuple(rows * op.n * item for rows in op.rows)
        return _by_rank("reduce_scatter", sizes, sizes, (sizes[rank],), op.m, op.n)
    return None


def _by_rank(
    kind: str,
    sizes: tuple[int, ...],
    given: tuple[int, ...],
    taken: tuple[int, ...],
    rows: int,
    columns: int,
) -> Exchange:
    each = sizes[0] if len(set(sizes)) == 1 else -1
    gathers = kind == "all_gather"
    return Exchange(KINDS[kind], sizes, given, taken, each, gathers, rows, columns)


def _by_pair(
    splits: Sequence[Sequence[int]], row: int, rank: int, gathers: bool, rows: int, columns: int
) -> Exchange:
    given = tuple(rows * row for rows in splits[rank])
    taken = tuple(sizes[rank] * row for sizes in splits)
    alike = len({rows * row for sizes in splits for rows in sizes}) == 1
    each = given[0] if alike else -1
    return Exchange(KINDS["all_to_all"], (), given, taken, each, gathers, rows, columns)


class CollectiveProgram:
    """Implements `weft.fabric.Program`."""

    computes = False
    shares_inputs = False

    def __init__(
        self,
        plan: Plan,
        fabric: ProcessFabric,
        channel: _native.Channel,
        exchange: Exchange,
        signatures: Sequence[int],
    ) -> None:
        self.plan = plan
        self.fabric = fabric
        self.exchange = exchange
        self.signatures = list(signatures)
        self.label = f"{plan.operation.label}, {plan.schedule}"
        name = exchange.kind.name
        self.way = f"{name}, then one GEMM" if exchange.gathers else f"one GEMM, then {name}"
        lane = plan.lanes.get((fabric.rank, COMPUTE), ())
        self.products = {task.c.buffer: task for task in lane if isinstance(task, Matmul)}
        copies = [t for t in plan.tasks if isinstance(t, Copy) and t.rank == fabric.rank]
        self.copies = {task.peer: task.label for task in copies}
        self.channel = channel
        self.weights = 1
        if isinstance(plan.operation, AllGatherMatmul | AllToAllMatmul):
            self.weights = len(plan.operation.columns[fabric.rank])
        dtype = DTYPES[plan.operation.dtype]
        self._dtype = dtype.torch
        self._bytes = exchange.rows * exchange.columns * dtype.bytes
        self._held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        schedule = plan.schedule
        cores = isinstance(schedule, Schedule) and schedule.engine == "cores"
        self._kind = (exchange.kind.number, dtype.channel or 0, dtype.bytes, _SUM, 0, cores)

    def start(
        self, call: ProcessCall, tensors: dict[str, torch.Tensor], record: bool
    ) -> CollectiveFlight:
        call.label = self.label
        return CollectiveFlight(self, call.number, tensors, self._between(call, tensors), record)

    def _between(self, call: ProcessCall, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """The gathered rows, or the product that is sent."""
        if "gathered" in tensors:  # an output
            return tensors["gathered"]
        memory = self._memory(call.number % 2)
        pointer = memory.data_ptr()
        kept = self._held.get(pointer)
        if kept is None or kept[0] is not memory:
            with torch.inference_mode(False):  # later calls may be outside of it
                view = memory[: self._bytes].view(self._dtype)
                view = view.view(self.exchange.rows, self.exchange.columns)
            if len(self._held) > 2:  # there are two turns
                self._held.clear()
            kept = self._held[pointer] = (memory, view)
        return kept[1]

    def _memory(self, turn: int) -> torch.Tensor:
        """Private memory for rows that come; shared memory for products that go, if there is some,
        because peers then read them in place."""
        memory = self.fabric.memory
        if not self.exchange.gathers:
            with contextlib.suppress(Unsupported):
                return memory.workspace("partial", self._bytes, turn).memory
        return memory.private(self._bytes)

    def repeat(self, proposal: Proposal) -> None:
        return None

    def carry_out(
        self, source: torch.Tensor, target: torch.Tensor, record: bool
    ) -> _native.Job | None:
        """Carries out the collective. Returns its job if it is recorded."""
        kind, sizes, given, taken, each, *_ = self.exchange
        fabric, channel = self.fabric, self.channel
        patience = nanoseconds(fabric.deadline)
        at, into = source.data_ptr() or _EMPTY, target.data_ptr() or _EMPTY
        job: _native.Job | None
        if each == 0:
            return None
        if each > 0:
            job = channel.alike(*self._kind, patience, at, into, each, False, record)
            if job is None:
                return None
        else:
            by_pair = kind.gives == "parts"
            job = channel.various(
                *self._kind,
                patience,
                by_pair,
                sizes,
                [at],
                given,
                [into],
                taken,
                False,
                record,
            )
        outcome = fabric.wait(
            lambda: channel.wait(job, _FOREVER), self.label, f"the {kind.name} of its peers"
        )
        if outcome[0] != OK:
            raise fabric.failure(outcome, self.label, f"the {kind.name} of its peers")
        return job


class CollectiveFlight:
    """One call of a collective program. Everything happens in `end`."""

    __slots__ = ("_between", "_call", "_program", "_record", "_tensors")

    def __init__(
        self,
        program: CollectiveProgram,
        call: int,
        tensors: dict[str, torch.Tensor],
        between: torch.Tensor,
        record: bool,
    ) -> None:
        self._program, self._call, self._record = program, call, record
        self._tensors, self._between = tensors, between

    def end(self) -> Ended:
        program, tensors, between = self._program, self._tensors, self._between
        if self._record:
            return self._recorded()
        if program.exchange.gathers:
            self._agree()
            program.carry_out(tensors["x"], between, False)
            for i in range(program.weights):
                multiply(between, tensors[f"w{i}"], tensors[f"y{i}"])
        else:
            multiply(tensors["x"], tensors["w"], between)
            self._agree()
            program.carry_out(between, tensors["y"], False)
        return UNRECORDED

    def _agree(self) -> None:
        """Waits until every rank has entered, with the headers that the plan was made for."""
        program, call = self._program, self._call
        fabric, signatures = program.fabric, program.signatures
        deadline = fabric.deadline_ns()
        outcome = fabric.native.agree(call, signatures, deadline)
        if outcome[0] != OK:
            outcome = fabric.wait(
                lambda: fabric.native.agree(call, signatures, deadline),
                program.label,
                "all ranks to enter the call",
                outcome,
            )
        if outcome[0] == DISAGREE:
            raise Disagree

    def cancel(self) -> None:
        """Does nothing: only this thread touches the buffers, and it has stopped."""

    # -- recording ---------------------------------------------------------------------------------

    def _recorded(self) -> Ended:
        program, tensors, between = self._program, self._tensors, self._between
        spans: list[Span] = []
        if program.exchange.gathers:
            self._agree()
            job = program.carry_out(tensors["x"], between, True)
            spans += self._moved(job)
            for i in range(program.weights):
                spans += self._timed(between, tensors[f"w{i}"], tensors[f"y{i}"], f"y{i}")
        else:
            spans += self._timed(tensors["x"], tensors["w"], between, "partial")
            self._agree()
            spans += self._moved(program.carry_out(between, tensors["y"], True))
        return Ended(Timeline(tuple(spans), str(program.plan.schedule)))

    def _timed(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, name: str) -> list[Span]:
        start = time.monotonic_ns()
        multiply(a, b, c)
        end = time.monotonic_ns()
        plan, rank = self._program.plan, self._program.fabric.rank
        task = self._program.products.get(name)
        return [] if task is None else [span_of(plan, task, rank, COMPUTE, start, end)]

    def _moved(self, job: _native.Job | None) -> list[Span]:
        """The spans of the collective: what came from each peer, and what this rank did with it."""
        if job is None:
            return []
        rank = self._program.fabric.rank
        found: dict[tuple[str, str, str], tuple[int, int, int]] = {}
        for act, peer, size, start, end in job.marks:
            key = self._named(act, peer)
            if key is not None:
                before = found.get(key, (start, end, 0))
                found[key] = (min(before[0], start), max(before[1], end), before[2] + size)
        return [
            Span(rank, lane, task, kind, start / 1e9, end / 1e9, size)
            for (lane, task, kind), (start, end, size) in found.items()
        ]

    def _named(self, act: int, peer: int) -> tuple[str, str, str] | None:
        """The lane, the name and the kind of the span of an act."""
        program = self._program
        rank, kind = program.fabric.rank, program.exchange.kind.name
        if program.exchange.gathers:
            source = rank if act in (_STAGE, _KEEP) else peer
            if act in (_STAGE, _KEEP, _COPY):
                return f"engine {source}", program.copies.get(source, ""), COMMUNICATION
        elif act == _TERM or (act == _COPY and kind == "all_to_all"):
            return f"engine {peer}", f"y{rank} of {peer}", COMMUNICATION
        elif act == _COPY:
            return f"engine {peer}", f"sum of {peer}", COMMUNICATION
        elif act == _REDUCE:
            return COMPUTE, "sum", "reduce"
        elif act in (_STAGE, _KEEP):
            return COMPUTE, "keep" if act == _KEEP else "send", "permute"
        return None


def multiply(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    """c = a @ b."""
    if a.shape[1]:
        torch.mm(a, b, out=c)
    else:
        c.zero_()
