"""Memory for results on the CPU: that of earlier results whose last tensor is gone.

The C library returns large blocks to the system when they are freed, and new pages cost more than
what a call writes to them: an all-reduce of 64 MiB into new memory takes three times as long as in
place.
"""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from weft.errors import Unsupported
from weft.fabric.storage_use import CAN_TELL, StorageUse

LEAST = 256 << 10
"""Bytes of a result from which memory is kept. The C library keeps smaller blocks itself."""
_DEFAULT = "256"


class _Kept(NamedTuple):
    """A block of memory, by a tensor of its bytes that no caller has."""

    base: torch.Tensor
    use: StorageUse


class Results:
    """Blocks that were given to results, the last used ones, up to `most` bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: dict[int, list[_Kept]] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def empty(self, shape: Sequence[int], dtype: torch.dtype, size: int) -> torch.Tensor:
        """A tensor of `size` bytes with any content."""
        with self._lock:
            kept = self._kept.pop(size, [])
            base = next((one.base for one in kept if one.use.has_ended()), None)
            if base is None:
                with torch.inference_mode(False):  # later calls may be outside of it
                    base = torch.empty(size, dtype=torch.uint8, device="cpu")
                if size <= self._most:
                    kept.append(_Kept(base, StorageUse(base)))
                    self._bytes += size
            if kept:
                self._kept[size] = kept  # as the size that was used last
            self._forget()
            return _on(base, shape, dtype)

    def _forget(self) -> None:
        """Forgets blocks beyond the limit: the oldest of the size that was used longest ago."""
        while self._bytes > self._most:
            size, kept = next(iter(self._kept.items()))
            del kept[0]
            self._bytes -= size
            if not kept:
                del self._kept[size]


def _on(base: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    storage = base.untyped_storage()
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, tuple(shape))  # type: ignore[call-overload, no-any-return]


def _limit() -> int:
    text = os.environ.get("WEFT_RESULTS") or _DEFAULT
    if not re.fullmatch("[0-9]{1,15}", text):
        raise Unsupported(f"WEFT_RESULTS must be a whole number of MiB, 0 for none, not {text!r}")
    return int(text) << 20


_results = Results(_limit())


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A contiguous tensor for a result, with any content."""
    size = math.prod(shape) * dtype.itemsize
    if size < LEAST or device.type != "cpu" or not CAN_TELL:
        return torch.empty(shape, dtype=dtype, device=device)
    return _results.empty(shape, dtype, size)


def maker(shape: Sequence[int], dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """Makes such tensors on the CPU, with no more than is needed for each."""
    size = math.prod(shape) * dtype.itemsize
    if size < LEAST or not CAN_TELL:
        return partial(torch.empty, shape, dtype=dtype, device="cpu")
    return partial(_results.empty, shape, dtype, size)


def empty_as(
    like: torch.Tensor, shape: Sequence[int], dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The same on the device of another tensor, and by default of its dtype."""
    return empty(shape, dtype or like.dtype, like.device)
