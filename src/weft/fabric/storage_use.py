"""Whether a caller still uses memory that was given to it as a tensor."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
"""The number of tensors on a storage, if this version of torch has the function."""

CAN_TELL = _count is not None
"""Whether this version of torch can tell; without it, memory is not kept for later results."""


class StorageUse:
    """The uses of the storage of a tensor by others, which begin after this is made."""

    __slots__ = ("_address", "_handle", "_objects", "_storage", "_tensors")

    def __init__(self, tensor: torch.Tensor) -> None:
        assert _count is not None
        self._storage = tensor.untyped_storage()
        self._handle: int = self._storage._cdata
        self._address = self._storage.data_ptr()
        self._tensors = _count(self._handle)
        self._objects = sys.getrefcount(self._storage)

    def has_ended(self) -> bool:
        """Whether no tensor and no object of a caller is left on it. Not if a caller has resized
        it, moved it to shared memory or shared it by copy-on-write: its address is another one
        then."""
        return (
            _count(self._handle) == self._tensors  # type: ignore[misc]
            and sys.getrefcount(self._storage) == self._objects
            and self._storage.data_ptr() == self._address
        )
