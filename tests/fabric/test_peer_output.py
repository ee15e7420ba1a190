"""Results into which peers store: their memory is used again when the caller is through with it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import pytest
import torch

from weft.fabric.host.peer_output import PeerOutputs

SHAPE = (8, 4)


@dataclass
class Block:
    """A block of a heap that only this process has."""

    size: int
    offset: int

    def __post_init__(self) -> None:
        self.memory = numpy.zeros(self.size, numpy.uint8)

    def array(self) -> numpy.ndarray:
        return self.memory[:]


class Heap:
    """Gives out blocks, and knows where in the memory of this process they are."""

    def __init__(self) -> None:
        self.outputs = PeerOutputs()
        self.blocks: list[Block] = []

    def make(self) -> torch.Tensor:
        """A result, which is where its offset says."""
        tensor, offset = self.outputs.make(SHAPE, torch.float32, self._allocate)
        assert tensor.data_ptr() == self.blocks[offset].memory.ctypes.data
        return tensor

    def _allocate(self, size: int) -> Block:
        self.blocks.append(Block(size, len(self.blocks)))
        return self.blocks[-1]


KEEPERS = {
    "view": lambda y: y[3:5],
    "numpy": lambda y: y.numpy(),
    "storage": lambda y: y.untyped_storage(),
    "shared memory": lambda y: y.share_memory_(),
}


def test_memory_is_used_again():
    heap = Heap()
    for _ in range(3):
        heap.make()
    assert len(heap.blocks) == 1


@pytest.mark.parametrize("how", KEEPERS)
def test_memory_that_somebody_uses_is_not_given_away(how):
    heap = Heap()
    kept = KEEPERS[how](heap.make())
    for _ in range(3):
        heap.make()
    assert len(heap.blocks) == 2
    del kept


def test_memory_that_was_moved_elsewhere_is_not_given():
    """`share_memory_` moves a storage out of the heap, also under tensors made from it later."""
    heap = Heap()
    heap.make().share_memory_()
    for _ in range(3):
        heap.make()
