"""A serial plan as plain code has it: one GEMM for each weight, and one collective of the channel
before or after them.

Nothing is staged, and no engine is woken: the calling thread moves the bytes. A rank enters the
call, announces its part of the collective at once, and compares headers while it waits for its
peers, so that the ranks meet only once. Products that are sent are made in private memory: from
there they go through rings, which is faster than reading them in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from weft.dtype import DTYPES, ON_HOST
from weft.fabric import _native
from weft.fabric.deadlines import nanoseconds
from weft.fabric.host.collective_spans import recorded
from weft.fabric.host.process_call import ProcessCall, break_off
from weft.fabric.host.process_flight import UNRECORDED, Ended
from weft.fabric.interface import Alone, Disagree, Exposed
from weft.fabric.outcomes import DISAGREE, OK, Outcome
from weft.fabric.proposal import Proposal
from weft.operation import result_dtype
from weft.plan.collective import OneCollective
from weft.plan.tasks import Plan
from weft.schedule import Schedule

if TYPE_CHECKING:
    from weft.fabric.processes import ProcessFabric

_FOREVER = 2**63 - 1


def collective_of(plan: Plan, rank: int) -> OneCollective | None:
    """The one collective that carries out the communication of a plan; None if there is none."""
    op, schedule = plan.operation, plan.schedule
    if not isinstance(schedule, Schedule) or not schedule.serial or schedule.engine == "direct":
        return None
    if op.world == 1 or op.dtype not in ON_HOST or result_dtype(op) != op.dtype:
        return None
    one_collective = getattr(op, "one_collective", None)
    return None if one_collective is None else cast(OneCollective | None, one_collective(rank))


class CollectiveProgram:
    """Implements `weft.fabric.Program`."""

    computes = False
    shares = False
    quick = _native.has_torch_product()

    def __init__(
        self,
        plan: Plan,
        fabric: ProcessFabric,
        channel: _native.Channel,
        collective: OneCollective,
        signatures: Sequence[int],
    ) -> None:
        self.plan, self.fabric, self.collective = plan, fabric, collective
        self.label = f"{plan.operation.label}, {plan.schedule}"
        kind = collective.kind
        self.way = f"{kind.name}, then one GEMM" if self.gathers else f"one GEMM, then {kind.name}"
        self._waiting_for = f"the {kind.name} of its peers"
        several = range(collective.weights) if self.gathers else [""]
        self.names = [(f"w{i}", f"y{i}") for i in several]
        """The weights, and the result of each."""
        self._weights = [w for w, _ in self.names]
        self._results = [y for _, y in self.names]
        self._known: tuple[Proposal, _native.SerialCall] | None = None
        self._moves = collective.moves
        self._inner = collective.inner
        dtype, schedule = DTYPES[plan.operation.dtype], cast(Schedule, plan.schedule)
        self._dtype, self._channel_dtype = dtype.torch, dtype.channel or 0
        row = collective.columns * dtype.bytes
        self._bytes = collective.rows * row
        self._memory = self._view = torch.empty(0, device="cpu")
        """Memory of the fabric, and the view of it between the collective and the products."""
        self._channel = channel
        self._signatures = list(signatures)
        self._exchange = _native.Exchange(
            kind.number,
            self._channel_dtype,
            dtype.bytes,
            schedule.engine == "cores",
            not collective.sizes,
            collective.moves,
            [rows * row for rows in collective.sizes],
            [rows * row for rows in collective.given],
            [rows * row for rows in collective.taken],
            self._signatures,
        )

    @property
    def gathers(self) -> bool:
        return self.collective.gathers

    def start(
        self, call: ProcessCall, tensors: dict[str, torch.Tensor], record: bool
    ) -> CollectiveFlight:
        call.label = self.label
        return CollectiveFlight(self, call.number, tensors, record)

    def repeat(self, proposal: Proposal) -> None:
        return None

    def once(self, proposal: Proposal, tensors: dict[str, torch.Tensor], exposed: Exposed) -> bool:
        fabric = self.fabric
        known = self._known_call(proposal)
        number = fabric.next_call()
        try:
            weights = [tensors[name] for name in self._weights]
            results = [tensors[name] for name in self._results]
            patience, between = nanoseconds(fabric.deadline), self.between(tensors)
            outcome = known.start(number, patience, tensors["x"], between, weights, results)
        except BaseException as error:
            break_off(fabric, number, error)
            raise
        return outcome[0] == OK or self._go_on(known, number, outcome)

    def _go_on(self, known: _native.SerialCall, number: int, outcome: Outcome | str) -> bool:
        """Goes on with a known call that has not ended yet. outcome: so far, or what torch said
        when it could not multiply. Returns False if the headers disagree."""
        fabric = self.fabric
        try:
            if isinstance(outcome, str):
                raise RuntimeError(outcome)
            outcome = fabric.wait(known.go, self.label, self._waiting_for, outcome)
            if outcome[0] == DISAGREE:
                return False
            if outcome[0] != OK:
                raise fabric.failure(outcome, self.label, self._waiting_for)
        except BaseException as error:
            break_off(fabric, number, error)
            raise
        return True

    def alone(self, proposal: Proposal, tensors: dict[str, torch.Tensor]) -> Alone | None:
        if len(self._weights) != 1 or "gathered" in tensors or not self._bytes:
            return None
        between, block, known = (
            self.between(tensors),
            self.fabric.memory.kept,
            self._known_call(proposal),
        )
        go_on, ends = partial(self._go_on, known), partial(break_off, self.fabric)
        return Alone(known, block, between, *self.names[0], go_on, ends)

    def _known_call(self, proposal: Proposal) -> _native.SerialCall:
        """The native call with this rank's header. A program nearly always has the same."""
        if self._known is None or self._known[0] is not proposal:
            header = proposal.unshared
            call = _native.SerialCall(
                self.fabric.heap,
                self._channel,
                self._exchange,
                self.gathers,
                header.signature,
                header.blob,
            )
            self._known = proposal, call
        return self._known[1]

    def run(self, call: int, tensors: dict[str, torch.Tensor]) -> None:
        """Carries out a call that this rank has entered."""
        between = self.between(tensors)
        if self.gathers:
            self.exchange(call, tensors["x"], between, False)
            for w, y in self.names:
                self.multiply(between, tensors[w], tensors[y])
        else:
            self.multiply(tensors["x"], tensors["w"], between)
            self.exchange(call, between, tensors["y"], False)

    def multiply(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        """c = a @ b."""
        if self.quick:
            _native.serial_product(self._channel_dtype, a, b, c)
        elif self._inner:
            torch.mm(a, b, out=c)
        else:
            c.zero_()

    def between(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """The gathered rows, or the product that is sent."""
        if "gathered" in tensors:  # an output
            return tensors["gathered"]
        memory = self.fabric.memory.private(self._bytes).memory
        if self._memory is not memory:
            with torch.inference_mode(False):  # later calls may be outside of it
                view = memory[: self._bytes].view(self._dtype)
                self._view = view.view(self.collective.rows, self.collective.columns)
            self._memory = memory
        return self._view

    def exchange(
        self, call: int, source: torch.Tensor, target: torch.Tensor, record: bool
    ) -> _native.Job | None:
        """Carries out the collective; returns its job if it is recorded. Raises `Disagree` if the
        headers of the ranks are not those that the plan was made for."""
        fabric, channel = self.fabric, self._channel
        if not self._moves:
            if not fabric.agree(call, self._signatures, fabric.deadline_ns(), self.label):
                raise Disagree
            return None
        patience = nanoseconds(fabric.deadline)
        at, into = source.data_ptr(), target.data_ptr()
        job = self._exchange.start(channel, call, patience, at, into, record)
        if job is None:
            return None
        outcome = fabric.wait(lambda: channel.wait(job, _FOREVER), self.label, self._waiting_for)
        if outcome[0] == DISAGREE:
            raise Disagree
        if outcome[0] != OK:
            raise fabric.failure(outcome, self.label, self._waiting_for)
        return job


class CollectiveFlight:
    """One call of a collective program. Everything happens in `end`."""

    __slots__ = ("_call", "_program", "_record", "_tensors")

    def __init__(
        self, program: CollectiveProgram, call: int, tensors: dict[str, torch.Tensor], record: bool
    ) -> None:
        self._program, self._call = program, call
        self._tensors, self._record = tensors, record

    def end(self) -> Ended:
        if self._record:
            return Ended(recorded(self._program, self._call, self._tensors))
        self._program.run(self._call, self._tensors)
        return UNRECORDED

    def cancel(self) -> None:
        """Does nothing: only this thread touches the buffers, and it has stopped."""
