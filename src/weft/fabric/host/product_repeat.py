"""Repeats a product that is summed over ranks, with other operands.

Decoding repeats the same small products, and the work around such a product costs as much as the
product. So everything that follows from the sizes is kept: the header, the kernel, and the expected
headers of the peers. The rest is one native call, which enters, computes and ends. With more rows,
torch makes the products between native calls: the columns of each owner are one GEMM, whose result
is stored into the memory of the owner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from weft.fabric import _native
from weft.fabric.deadlines import nanoseconds
from weft.fabric.host.packing import Place, packed
from weft.fabric.host.process_call import break_off
from weft.fabric.interface import PeerOutput
from weft.fabric.outcomes import DISAGREE, OK, OUTSIDE, Outcome
from weft.fabric.proposal import Proposal
from weft.fabric.reach import WorkspaceBlock
from weft.plan.tasks import KernelTiles, Part

if TYPE_CHECKING:
    from weft.fabric.host.kernel_program import KernelProgram

BUFFERS = ["x", "w", "y", "partial", "inbox"]
"""The buffers of the kernel, in the order of the native code."""
SLOTS = ["inbox", "y"]
_NO_INBOX = WorkspaceBlock.of(torch.empty(0, dtype=torch.uint8, device="cpu"), 0)
"""Of a rank without peers."""
_UNUSED: Place = (0, 0, False, 0, 0)
"""Of a weight that only torch reads."""


class ProductRepeat:
    """A call without its operands. Implements `weft.fabric.Repeat`."""

    __slots__ = ("_fabric", "_label", "_native", "_partial", "_pitch", "_rows")

    def __init__(self, program: KernelProgram, proposal: Proposal) -> None:
        self._fabric = program.fabric
        self._label = program.label
        self._rows = self._pitch = 0
        with torch.inference_mode(False):  # later calls may be outside of it
            self._partial = torch.empty(program.workspace_bytes, dtype=torch.uint8, device="cpu")
        self._native = _native.Repeat(
            program.kernel,
            program.variant,
            proposal.signature,
            proposal.blob,
            program.signatures,
            self._partial.data_ptr(),
        )

    def run(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        scale: torch.Tensor | None,
        workspace: Mapping[str, int],
        output: PeerOutput,
    ) -> bool:
        fabric, native = self._fabric, self._native
        kept, place = self._place(w)
        if scale is not None:
            scale = scale.contiguous()
        if not self._rows:  # the same in every call
            # x is a matrix, or contiguous: rows of K elements, one behind the other.
            k, item = x.shape[-1], x.element_size()
            self._rows = x.numel() // k
            self._pitch = x.stride(0) * item if x.dim() == 2 else k * item
        call = fabric.next_call()
        try:
            inbox = _NO_INBOX
            if workspace:
                inbox = fabric.memory.workspace("inbox", workspace["inbox"], call % 2)
            outcome = native.start(
                fabric.heap,
                call,
                nanoseconds(fabric.deadline),
                x.data_ptr(),
                self._rows,
                self._pitch,
                *place,
                0 if scale is None else scale.data_ptr(),
                output.tensor.data_ptr(),
                inbox.pointer,
                inbox.offset,
                output.offset,
                torch.get_num_threads(),
            )
            if outcome[0] != OK and self._go_on(outcome, call, x, w)[0] == DISAGREE:
                return False
        except BaseException as error:
            break_off(fabric, call, error)
            raise
        del kept  # the packed weight had to exist until here
        return True

    def _place(self, w: torch.Tensor) -> tuple[object, Place]:
        """The weight as the kernel takes it, and what must exist as long as the call."""
        return packed(w)

    def _go_on(self, outcome: Outcome, call: int, x: torch.Tensor, w: torch.Tensor) -> Outcome:
        """Goes on with a call that has not ended yet, up to its end."""
        waiting_for = "the blocks of its peers"
        return self._fabric.wait(self._native.go, self._label, waiting_for, outcome)


class ManyRowsRepeat(ProductRepeat):
    """The same, where torch makes the products."""

    __slots__ = ("_own", "_parts", "_program")

    def __init__(self, program: KernelProgram, proposal: Proposal) -> None:
        super().__init__(program, proposal)
        self._program = program
        tasks = [task for task in program.lane if isinstance(task, KernelTiles)]
        self._parts = [task.parts for task in tasks]
        b = next(b for b in program.buffers if b.name == "partial")
        with torch.inference_mode(False):
            own = self._partial[: b.num_bytes].view(getattr(torch, b.dtype))
            self._own = own.view(b.rows, b.columns)

    def _place(self, w: torch.Tensor) -> tuple[object, Place]:
        return None, _UNUSED

    def _go_on(self, outcome: Outcome, call: int, x: torch.Tensor, w: torch.Tensor) -> Outcome:
        native = self._native
        rows = x if x.dim() == 2 else x.view(self._rows, -1)
        for parts in self._parts:
            if outcome[0] != OUTSIDE:
                outcome = super()._go_on(outcome, call, x, w)
                if outcome[0] != OUTSIDE:
                    return outcome
            make_products(self._program, call, parts, rows, w, self._own)
            outcome = native.go()
        return outcome if outcome[0] == OK else super()._go_on(outcome, call, x, w)


def make_products(
    program: KernelProgram,
    call: int,
    parts: Sequence[Part],
    x: torch.Tensor,
    w: torch.Tensor,
    own: torch.Tensor,
) -> None:
    """Makes products with torch: into `own`, or into the memory of the peer that adds them."""
    for part in parts:
        c, b = part.c, part.b
        target = own if c.rank == program.fabric.rank else program.peer_tensor(call, c)
        if c.columns != target.shape[1] or c.rows != target.shape[0]:
            target = target[c.row : c.row + c.rows, c.column : c.column + c.columns]
        if x.shape[1]:
            torch.mm(x, w.narrow(1, b.column, b.columns), out=target)
        else:
            target.zero_()
