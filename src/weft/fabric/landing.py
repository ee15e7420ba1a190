"""Landings: results in shared memory, into which peers store while a call is under way.

A landing belongs to the caller once the call is over. When its last tensor is gone the memory is
kept for the next landing of its size, for fresh pages cost more than what is stored into them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from weft.fabric import _native

_MOST_KEPT = 4
"""Landings of one size that are kept for later."""
_GRAIN = 1 << 16


class Landing(NamedTuple):
    """A result, and where peers find it."""

    tensor: torch.Tensor
    offset: int


class Landings:
    """The landings of one fabric."""

    def __init__(self) -> None:
        self._free: dict[int, list[_native.Block]] = {}
        self._lost: list[torch.Tensor] = []

    def make(
        self, shape: Sequence[int], dtype: torch.dtype, allocate: Callable[[int], _native.Block]
    ) -> Landing:
        count = math.prod(shape)
        size = -(-max(count * dtype.itemsize, 1) // _GRAIN) * _GRAIN
        free = self._free.setdefault(size, [])
        block = free.pop() if free else allocate(size)
        array = block.array()
        weakref.finalize(array, _give_back, free, block).atexit = False
        raw = torch.from_numpy(array)
        return Landing(raw.view(dtype)[:count].view(tuple(shape)), block.offset)

    def lose(self, tensor: torch.Tensor) -> None:
        """Never uses a landing again: its call failed, and a peer may still store into it."""
        self._lost.append(tensor)

    def clear(self) -> None:
        self._free.clear()


def _give_back(free: list[_native.Block], block: _native.Block) -> None:
    if len(free) < _MOST_KEPT:
        free.append(block)
