"""Repeats a product of few rows with other operands.

Decoding repeats the same small products, and the work around such a product costs as much as the
product. So everything that follows from the sizes is kept: the header, the kernel, and the expected
headers of the peers. The rest is one native call, which enters, computes and ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from weft.fabric import _native
from weft.fabric.deadlines import nanoseconds
from weft.fabric.host.packing import packed
from weft.fabric.host.process_call import break_off
from weft.fabric.interface import PeerOutput
from weft.fabric.outcomes import DISAGREE, OK
from weft.fabric.proposal import Proposal

if TYPE_CHECKING:
    from weft.fabric.host.kernel_program import KernelProgram

BUFFERS = ["x", "w", "y", "partial", "inbox"]
"""The buffers of the kernel, in the order of the native code."""
SLOTS = ["inbox", "y"]


class ProductRepeat:
    """A call without its operands. Implements `weft.fabric.Repeat`."""

    __slots__ = ("_fabric", "_label", "_native", "_pitch", "_rows")

    def __init__(self, program: KernelProgram, proposal: Proposal) -> None:
        self._fabric = program.fabric
        self._label = program.label
        self._rows = self._pitch = 0
        self._native = _native.Repeat(
            program.kernel,
            program.variant,
            proposal.signature,
            proposal.blob,
            program.signatures,
            program.workspace_bytes,
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
        kept, place = packed(w)
        if scale is not None:
            scale = scale.contiguous()
        if not self._rows:  # the same in every call
            # x is a matrix, or contiguous: rows of K elements, one behind the other.
            k, item = x.shape[-1], x.element_size()
            self._rows = x.numel() // k
            self._pitch = x.stride(0) * item if x.dim() == 2 else k * item
        call = fabric.next_call()
        try:
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
            )
            if outcome[0] != OK:
                waiting_for = "the blocks of its peers"
                outcome = fabric.wait(native.go, self._label, waiting_for, outcome)
                if outcome[0] == DISAGREE:
                    return False
        except BaseException as error:
            break_off(fabric, call, error)
            raise
        del kept  # the packed weight had to exist until here
        return True
