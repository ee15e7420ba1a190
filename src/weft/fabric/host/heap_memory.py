"""This rank's part of the shared heap: symmetric tensors, staged inputs, workspace and results."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch

from weft.errors import Unsupported
from weft.fabric import _native
from weft.fabric.host.peer_output import PeerOutputs
from weft.fabric.interface import PeerOutput
from weft.fabric.reach import WorkspaceBlock

_MOST = 2**63
"""More than any heap holds, and not too large a number for native code."""


_GRAIN = 1 << 16
_ROOMY = 1 << 26


class HeapMemory:
    """The memory of one rank that the members of its machine can reach."""

    def __init__(self, heap: _native.Fabric, lock: threading.RLock, alone: bool) -> None:
        """lock: the lock of the fabric. alone: no other rank shares the heap, so inputs need not be
        staged."""
        self._heap = heap
        self._lock = lock
        self._alone = alone
        self._stage: list[_native.Block | None] = [None, None]
        self._shared: dict[tuple[str, int], WorkspaceBlock] = {}
        self.kept: WorkspaceBlock | None = None
        """The private memory that is kept between calls."""
        self.outputs = PeerOutputs()

    @property
    def allocated(self) -> int:
        return self._heap.allocated

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if not all(isinstance(size, int) and size >= 0 for size in shape):
            raise Unsupported(f"a tensor cannot have the shape {list(shape)}")
        if not isinstance(dtype, torch.dtype):
            raise Unsupported(f"dtype must be one of torch, e.g. torch.float32, not {dtype!r}")
        count = math.prod(shape)
        block = self.allocate(max(count, 1) * dtype.itemsize)
        return torch.from_numpy(block.array()).view(dtype)[:count].view(tuple(shape))

    def output(
        self, shape: Sequence[int], dtype: torch.dtype, out: torch.Tensor | None = None
    ) -> PeerOutput:
        if out is not None and out.is_contiguous():
            offset = self._heap.offset_of(out.data_ptr())
            if offset >= 0:
                return PeerOutput(out, offset)
        with self._lock:
            return self.outputs.make(shape, dtype, self.allocate)

    def abandon(self, output: PeerOutput) -> None:
        self.outputs.abandon(output.tensor)

    def share(self, tensor: torch.Tensor, turn: int) -> tuple[int, bool]:
        """Makes a contiguous tensor readable for peers. Returns its offset in the heap, and whether
        it is read in place. Other tensors are copied into a stage. Two stages take turns, and the
        last readers of a stage have finished before its next turn."""
        if self._alone:
            return 0, False
        pointer = tensor.data_ptr()
        offset = self._heap.offset_of(pointer)
        if offset >= 0:
            return offset, True
        size = tensor.nbytes
        stage = self._stage[turn]
        if stage is None or stage.size < size:
            self._stage[turn] = None
            stage = self._stage[turn] = self.allocate(_roomy(size))
        self._heap.stage(stage, pointer, size)
        return stage.offset, False

    def workspace(self, name: str, size: int, turn: int) -> WorkspaceBlock:
        """Memory for one call that peers may read and write. Like stages, two of each name take
        turns: when a call uses one, no rank still uses what an earlier call left there."""
        key = (name, turn)
        found = self._shared.get(key)
        if found is None or found.size < size:
            self._shared.pop(key, None)
            block = self.allocate(_roomy(size))
            with torch.inference_mode(False):  # later calls may be outside of it
                memory = torch.from_numpy(block.array())
            found = self._shared[key] = WorkspaceBlock.of(memory, block.offset)
        return found

    def private(self, size: int) -> WorkspaceBlock:
        """Private memory for one call at a time. It is kept between calls."""
        if self.kept is None or self.kept.size < size:
            with torch.inference_mode(False):  # later calls may be outside of it
                memory = torch.empty(size, dtype=torch.uint8, device="cpu")
            self.kept = WorkspaceBlock.of(memory)
        return self.kept

    def allocate(self, size: int) -> _native.Block:
        size = min(size, _MOST)
        try:
            return self._heap.allocate(size)
        except MemoryError:
            example = ", e.g. WEFT_HEAP=64GiB" if self.allocated + size < 64 * 2**30 else ""
            raise Unsupported(
                f"the symmetric heap cannot hold {size / 2**20:.0f} MiB more; "
                f"set WEFT_HEAP to a larger size{example}"
            ) from None

    def clear(self) -> None:
        """Frees everything that no tensor of the user needs."""
        self._stage = [None, None]
        self._shared.clear()
        self.outputs.clear()


def _roomy(size: int) -> int:
    """The size of memory that is kept between calls, with room for calls that are a little larger:
    batches and sequences grow step by step. Pages take memory only when touched."""
    return max(_GRAIN, 1 << (size - 1).bit_length()) if size <= _ROOMY else size
