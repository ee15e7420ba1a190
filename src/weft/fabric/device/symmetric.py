"""Symmetric memory of a device: every rank has the same slab, and sees those of its peers.

A data slab has three parts of equal size. Eager calls use the first two in turn, so that a rank may
write the data of its next call while peers still read that of the last. Captured calls use the
third, because a graph can be replayed at any time. Programs keep the slab that they were made for;
a program that needs more gets a larger slab.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from weft.errors import Unsupported
from weft.fabric.interface import PeerOutput
from weft.fabric.rendezvous import LOOK, watched

CAPTURED = 2
PARTS = 3
ALIGNMENT = 256
_LEAST = 1 << 20
_SEEN_WITHIN = 5.0
"""Seconds in which a peer that died is seen to have, once its memory is missing: on a busy machine
its threads take a while to end, and the last one counts."""


class Slab:
    """Memory of equal size on all ranks. All ranks make it together."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        size: int,
        look_after: Callable[[], None],
        zeroed: bool = False,
    ) -> None:
        """look_after: raises if a peer is lost; called while this waits for the others."""
        self.size = size
        self.own = symm_mem.empty(size, dtype=torch.uint8, device=device)
        if zeroed:  # before any peer can write there
            self.own.zero_()
            torch.accelerator.synchronize(device)
        handle = _meet(self.own, group, look_after)
        if handle is None:
            raise Unsupported("torch's symmetric memory does not serve this device")
        self._handle = handle
        self._base = int(handle.offset)
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


def _meet(own: torch.Tensor, group: dist.ProcessGroup, look_after: Callable[[], None]) -> Any:
    """The handle on the memory of all ranks."""

    def make() -> Any:
        torch.accelerator.set_device_index(own.device.index)
        return symm_mem.rendezvous(own, group)

    made = watched(make, look_after)
    if isinstance(made, RuntimeError):
        until = time.monotonic() + _SEEN_WITHIN
        while time.monotonic() < until:
            look_after()  # a lost peer is the better reason
            time.sleep(LOOK)
        raise Unsupported(f"the devices of this group cannot see each other's memory: {made}")
    return made


class SlabMemory:
    """The slabs of one group. Implements `weft.fabric.interface.Memory`."""

    def __init__(
        self,
        group: Callable[[], dist.ProcessGroup],
        device: torch.device,
        look_after: Callable[[], None],
    ) -> None:
        self._group, self._device, self._look_after = group, device, look_after
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
        self._slabs.append(Slab(self._group(), self._device, wanted, self._look_after))
        return self._slabs[-1]

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        raise Unsupported(
            "symmetric_empty is for CPU tensors; on a device weft stages the inputs of a call in "
            "symmetric memory of its own"
        )

    def output(
        self, shape: Sequence[int], dtype: torch.dtype, out: torch.Tensor | None = None
    ) -> PeerOutput:
        raise Unsupported(
            "on a device no kernel of this operator stores into the memory of peers; use adaptive, "
            "or the kernels of weft.triton"
        )

    def abandon(self, output: PeerOutput) -> None:
        """Does nothing: results are never in memory that peers reach."""

    def clear(self) -> None:
        self._slabs.clear()


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
