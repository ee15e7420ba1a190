"""Symmetric memory of a device: every rank has the same slab, and sees those of its peers.

A data slab has three parts of equal size. Eager calls use the first two in turn, so that a rank may
write the data of its next call while peers still read that of the last. Captured calls use the
third, because a graph can be replayed at any time. Programs keep the slab that they were made for;
a program that needs more gets a larger slab.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from weft.errors import Unsupported
from weft.fabric.interface import PeerOutput

CAPTURED = 2
PARTS = 3
ALIGNMENT = 256
_LEAST = 1 << 20


class Slab:
    """Memory of equal size on all ranks. All ranks make it together."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, size: int, zeroed: bool = False
    ) -> None:
        self.size = size
        self.own = symm_mem.empty(size, dtype=torch.uint8, device=device)
        if zeroed:  # before any peer can write there
            self.own.zero_()
            torch.accelerator.synchronize(device)
        try:
            handle = symm_mem.rendezvous(self.own, group)
        except RuntimeError as error:
            raise Unsupported(
                f"the devices of this group cannot see each other's memory: {error}"
            ) from None
        if handle is None:
            raise Unsupported("torch's symmetric memory does not serve this device")
        self._handle = handle
        self._base = int(handle.offset)  # type: ignore[attr-defined]
        self._pointers = [int(pointer) + self._base for pointer in handle.buffer_ptrs]

    def start_of(self, part: int) -> int:
        """The offset of one of the three parts of a data slab."""
        return part * (self.size // PARTS // ALIGNMENT * ALIGNMENT)

    def pointer(self, rank: int, offset: int) -> int:
        """The address, on this device, of a byte in a rank's slab."""
        return self._pointers[rank] + offset

    def view(
        self, rank: int, offset: int, rows: int, columns: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """A matrix in a rank's slab, as a tensor of this device."""
        at = (self._base + offset) // dtype.itemsize
        view: torch.Tensor = self._handle.get_buffer(rank, (rows, columns), dtype, at)
        return view


class SymmetricMemory:
    """The slabs of one group. Implements `weft.fabric.interface.Memory`."""

    def __init__(self, group: Callable[[], dist.ProcessGroup], device: torch.device) -> None:
        self._group, self._device = group, device
        self._slabs: list[Slab] = []

    @property
    def allocated(self) -> int:
        return sum(slab.size for slab in self._slabs)

    def slab(self, part: int) -> Slab:
        """A slab with three parts of at least so many bytes. All ranks call this together, if one
        must be made, and then none may be capturing."""
        for slab in self._slabs:
            if slab.size >= PARTS * part:
                return slab
        last = self._slabs[-1].size if self._slabs else 0
        wanted = max(_LEAST, 2 * last, PARTS * aligned(part))
        self._slabs.append(Slab(self._group(), self._device, wanted))
        return self._slabs[-1]

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        raise Unsupported(
            "symmetric_empty is for CPU tensors; on a device weft stages the inputs of a call in "
            "symmetric memory of its own"
        )

    def output(
        self, shape: Sequence[int], dtype: torch.dtype, out: torch.Tensor | None = None
    ) -> PeerOutput:
        raise Unsupported("on a device no kernel of this operator stores into the memory of peers")

    def abandon(self, output: PeerOutput) -> None:
        """Does nothing: results are never in memory that peers reach."""

    def clear(self) -> None:
        self._slabs.clear()


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
