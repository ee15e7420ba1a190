"""Results in shared memory, into which peers store during a call.

A result belongs to the caller when the call has ended. When its last tensor is gone, the memory is
kept for the next result of its size, because new pages cost more than the stores into them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from weft.fabric import _native
from weft.fabric.interface import PeerOutput
from weft.fabric.storage_use import CAN_TELL, StorageUse

_MOST_KEPT = 4
"""How many results of one size are kept for later."""
_MOST_SHAPES = 1024
_GRAIN = 1 << 16

Allocate = Callable[[int], _native.Block]
Layout = tuple[Sequence[int], torch.dtype]
"""The shape and the dtype of a result."""


@dataclass
class _Kept:
    """Memory that is reused whenever no tensor but its own is left on it."""

    tensor: torch.Tensor
    layout: Layout
    """That of `tensor`; comparing it is faster than asking torch."""
    offset: int
    use: StorageUse

    def given(self, layout: Layout) -> PeerOutput:
        """A new tensor on this memory for the caller."""
        if self.layout != layout:
            with torch.inference_mode(False):  # later calls may be outside of it
                raw = torch.empty(0, dtype=torch.uint8, device="cpu").set_(
                    self.tensor.untyped_storage()
                )
                self.tensor, self.layout = _shaped(raw, *layout), layout
        return PeerOutput(self.tensor.detach(), self.offset)


def _keep(block: _native.Block, shape: Sequence[int], dtype: torch.dtype) -> _Kept:
    with torch.inference_mode(False):  # later calls may be outside of it
        tensor = _shaped(torch.from_numpy(block.array()), shape, dtype)
    return _Kept(tensor, (shape, dtype), block.offset, StorageUse(tensor))


class PeerOutputs:
    """The results of one fabric into which peers store."""

    def __init__(self) -> None:
        self._kept: dict[int, list[_Kept]] = {}
        self._last: dict[Layout, _Kept] = {}
        self._free: dict[int, list[_native.Block]] = {}
        self._abandoned: list[torch.Tensor] = []

    def make(self, shape: Sequence[int], dtype: torch.dtype, allocate: Allocate) -> PeerOutput:
        """Memory for a result. Most callers hold few results of one size at a time and get memory
        that was kept, which is fast. Callers that hold more get new memory."""
        layout = (shape, dtype)
        last = self._last.get(layout)
        if last is not None and last.use.has_ended():
            return last.given(layout)
        count = math.prod(shape)
        size = -(-max(count * dtype.itemsize, 1) // _GRAIN) * _GRAIN
        kept = self._kept.setdefault(size, [])
        found = next((one for one in kept if one.use.has_ended()), None)
        if found is None and CAN_TELL and len(kept) < _MOST_KEPT:
            found = _keep(allocate(size), shape, dtype)
            kept.append(found)
        if found is not None:
            if len(self._last) >= _MOST_SHAPES:
                self._last.clear()
            self._last[layout] = found
            return found.given(layout)
        free = self._free.setdefault(size, [])
        block = free.pop() if free else allocate(size)
        array = block.array()
        weakref.finalize(array, _give_back, free, block).atexit = False
        return PeerOutput(_shaped(torch.from_numpy(array), shape, dtype), block.offset)

    def abandon(self, tensor: torch.Tensor) -> None:
        """Never reuses the memory of a result, because a peer may still store into it."""
        self._abandoned.append(tensor)

    def clear(self) -> None:
        self._kept.clear()
        self._last.clear()
        self._free.clear()


def _shaped(raw: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    count = math.prod(shape)
    return raw.view(dtype)[:count].view(tuple(shape)).detach()


def _give_back(free: list[_native.Block], block: _native.Block) -> None:
    if len(free) < _MOST_KEPT:
        free.append(block)
