"""A serial plan between machines as plain code has it: one GEMM for each weight, and one exchange
before or after them.

If the bytes of a known call travel with its headers, the whole call is one step of the calling
thread: it sends one message to every peer, and waits for theirs. All other calls run task by task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from weft.dtype import DTYPES
from weft.fabric.group.network_native import NetworkNative
from weft.fabric.group.transfers import Payload, bytes_of
from weft.fabric.host.engine_program import EngineProgram
from weft.fabric.host.process_call import break_off
from weft.fabric.interface import Exposed
from weft.fabric.outcomes import CORRUPT, OK
from weft.fabric.product_sums import add
from weft.fabric.proposal import Proposal
from weft.plan.collective import OneCollective
from weft.plan.tasks import Plan

if TYPE_CHECKING:
    from weft.fabric.processes import ProcessFabric


class _Buffer(NamedTuple):
    """Rows of a call, and their bytes."""

    tensor: torch.Tensor
    raw: Payload

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Buffer:
        return cls(tensor, bytes_of(tensor))


class EagerProgram(EngineProgram):
    """Implements `weft.fabric.QuickProgram`, if `quick`."""

    def __init__(
        self,
        plan: Plan,
        fabric: ProcessFabric,
        slots: Sequence[str],
        signatures: Sequence[int],
        collective: OneCollective,
    ) -> None:
        super().__init__(plan, fabric, slots, signatures)
        self.quick = self.engines.eager != 0
        kind, world = collective.kind, fabric.world
        self._gathers, self._sums, self._inner = collective.gathers, kind.sums, collective.inner
        several = range(collective.weights) if self._gathers else ()
        self._products = [(f"w{i}", f"y{i}") for i in several]
        given, taken = collective.given, collective.taken
        self._given = [(0, given[0])] * world if kind.gives == "part" else _ranges(given)
        """The rows of x or of the product that go to each rank."""
        self._taken = _ranges(taken * world if kind.sums else taken)
        """Where the rows of each rank are put."""
        self._dtype, self._columns = DTYPES[plan.operation.dtype].torch, collective.columns
        self._rows = [collective.rows, taken[0] * world if kind.sums else 0]
        """Of the gathered rows or the product that is sent, and of the parts that are added."""
        self._memory: torch.Tensor | None = None
        self._kept: tuple[_Buffer, _Buffer] | None = None

    def once(self, proposal: Proposal, tensors: dict[str, torch.Tensor], exposed: Exposed) -> bool:
        fabric, native = self.fabric, cast(NetworkNative, self.fabric.native)
        number, eager = fabric.next_call(), self.engines.eager
        try:
            between, inbox = self._buffers(tensors)
            if self._gathers:
                source = bytes_of(tensors["x"])
            else:
                source = between.raw
                self._multiply(tensors["x"], tensors["w"], between.tensor)
            parts = {
                peer: (source[begin:end],)
                for peer, (begin, end) in enumerate(self._given)
                if begin != end and peer != fabric.rank
            }
            native.enter(number, proposal.signature, (), proposal.blob, eager, parts)
            if not fabric.agree(number, self.signatures, fabric.deadline_ns(), self.label):
                return False
            came = native.came(number, eager)
            if came is None:
                return False
            if self._gathers:
                self._place(came, source, between.raw)
                for w, y in self._products:
                    self._multiply(between.tensor, tensors[w], tensors[y])
            elif self._sums:
                self._place(came, source, inbox.raw)
                add(torch.split(inbox.tensor, self._rows[1] // fabric.world), [tensors["y"]])
            else:
                self._place(came, source, bytes_of(tensors["y"]))
            outcome = native.done(number)
            if outcome[0] != OK:
                raise fabric.failure(outcome, self.label, "its end")
        except BaseException as error:
            break_off(fabric, number, error)
            raise
        return True

    def _buffers(self, tensors: dict[str, torch.Tensor]) -> tuple[_Buffer, _Buffer]:
        """The gathered rows or the product that is sent, and the parts that are added."""
        size = sum(self._rows) * self._columns * self._dtype.itemsize
        memory = self.fabric.memory.private(size).memory
        if self._kept is None or self._memory is not memory:
            with torch.inference_mode(False):  # later calls may be outside of it
                flat = memory[:size].view(self._dtype)
                whole = flat.view(sum(self._rows), self._columns)
                between, inbox = map(_Buffer.of, torch.split(whole, self._rows))
            self._kept, self._memory = (between, inbox), memory
        if "gathered" in tensors:  # an output
            return _Buffer.of(tensors["gathered"]), self._kept[1]
        return self._kept

    def _place(self, came: Mapping[int, Payload], source: Payload, target: Payload) -> None:
        """Puts the rows of all ranks where they belong. A peer that sent fewer or more bytes than
        the plan says ends the call."""
        for peer, sent in came.items():
            if sent.nbytes != target[slice(*self._taken[peer])].nbytes:
                raise self.fabric.failure((CORRUPT, peer), self.label, "its bytes")
        for peer, (begin, end) in enumerate(self._taken):
            if peer in came:
                room = target[begin:end]
                room[...] = came[peer].reshape(room.shape)
            else:
                target[begin:end] = source[slice(*self._given[peer])]

    def _multiply(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        """c = a @ b."""
        if self._inner:
            torch.mm(a, b, out=c)
        else:
            c.zero_()


def _ranges(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Where pieces of these sizes begin and end, one behind the other."""
    ends = list(accumulate(sizes))
    return list(zip([0, *ends], ends, strict=False))
