"""Weights as the kernels for few rows like them: with the elements of a column side by side.

`linear.weight.t()` is so already. Others are packed when they are seen for the second time, and
the pack is kept for as long as the weight is there and has not been written to.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from weft.fabric import _native

_SAMPLES = 64
_MOST = 4096

Key = tuple[object, ...]


class _Pack(NamedTuple):
    storage: StorageWeakRef
    version: int
    columns: torch.Tensor | None


_packs: dict[Key, _Pack] = {}


def packed(w: torch.Tensor) -> torch.Tensor:
    """w, or an equal tensor whose columns lie together if w has been here before.

    A write to w is noticed by its version counter; writes through `w.data` leave no trace there, so
    some elements are compared as well.
    """
    k, n = w.shape
    if k <= 1 or n == 0 or w.stride(0) == 1 or os.environ.get("WEFT_PREPACK") == "0":
        return w
    storage = w.untyped_storage()
    key = (storage._cdata, w.storage_offset(), tuple(w.shape), w.stride(), w.dtype)
    version = -1 if w.is_inference() else w._version
    found = _packs.get(key)
    if found is None or _is_gone(found) or found.version != version:
        _forget_dead()
        _packs[key] = _Pack(StorageWeakRef(storage), version, None)  # type: ignore[no-untyped-call]
        return w
    if found.columns is not None and _same(w, found.columns):
        return found.columns.t()
    columns = w.detach().t().contiguous()
    _packs[key] = found._replace(columns=columns)
    return columns.t()


def _same(w: torch.Tensor, columns: torch.Tensor) -> bool:
    """Whether some elements, spread over all of them, are equal in both."""
    k, n = w.shape
    pitches = (w.stride(0), w.stride(1))
    return _native.same_samples(
        w.data_ptr(), *pitches, columns.data_ptr(), k, n, w.element_size(), _SAMPLES
    )


def _forget_dead() -> None:
    for key in [key for key, pack in _packs.items() if _is_gone(pack)]:
        del _packs[key]
    while len(_packs) >= _MOST:
        del _packs[next(iter(_packs))]


def _is_gone(pack: _Pack) -> bool:
    """Whether the weight of a pack is no more."""
    return bool(pack.storage.expired())  # type: ignore[no-untyped-call]
