"""Weights in the layout that suits the kernels for few rows: with contiguous columns.

`linear.weight.t()` has this layout. Other weights are packed when they are used for the second
time, and the packed copy is kept for as long as the weight exists and is not written to.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from weft.dtype import kernel_numbers
from weft.fabric import _native

Place = tuple[int, int, bool, int, int]
"""A weight in memory: its address, its type, whether its columns are contiguous, the bytes from one
row (or column) to the next, and the number of its rows."""

_TYPES = kernel_numbers()
_SWITCH = "WEFT_PREPACK"
_SAMPLES = 16
_MOST = 4096


class _Pack(NamedTuple):
    storage: StorageWeakRef
    version: int
    columns: torch.Tensor | None
    """[K, N] with contiguous columns."""
    place: Place | None


_packs: dict[tuple[object, ...], _Pack] = {}


def packed(w: torch.Tensor) -> tuple[torch.Tensor, Place]:
    """w, or its packed copy with contiguous columns if w was used before; and its place in memory.
    The rows or the columns of the result are contiguous, whatever w is a view of.

    A write to w changes its version counter. Writes through `w.data` do not, so some elements are
    compared as well.
    """
    k, n = shape = w.shape
    row, column = strides = w.stride()
    pointer, dtype = w.data_ptr(), w.dtype
    if row == 1 and k > 1:
        return w, (pointer, _TYPES[dtype], True, column * dtype.itemsize, k)
    if k <= 1 or n == 0 or (_native.is_set(_SWITCH) and os.environ.get(_SWITCH) == "0"):
        return _by_rows(w)
    key = (pointer, shape, strides, dtype)
    version = -1 if w.is_inference() else w._version
    found = _packs.get(key)
    if found is None or _is_gone(found) or found.version != version:
        _forget_dead()
        storage = StorageWeakRef(w.untyped_storage())  # type: ignore[no-untyped-call]
        _packs[key] = _Pack(storage, version, None, None)
        return _by_rows(w)
    columns, place = found.columns, found.place
    if columns is not None and place is not None:
        item = dtype.itemsize
        if _native.same_samples(pointer, row, column, place[0], k, n, item, _SAMPLES):
            return columns, place
    columns = _by_columns(w)
    place = (columns.data_ptr(), _TYPES[dtype], True, k * dtype.itemsize, k)
    _packs[key] = found._replace(columns=columns, place=place)
    return columns, place


def _by_columns(w: torch.Tensor) -> torch.Tensor:
    """A copy of w with contiguous columns. It is read completely in every call, so it is put on
    large pages, if the system has some."""
    k, n = w.shape
    columns = torch.empty(n, k, dtype=w.dtype, device="cpu")
    _native.advise_huge(columns.data_ptr(), columns.nbytes)
    return columns.copy_(w.detach().t()).t()


def _by_rows(w: torch.Tensor) -> tuple[torch.Tensor, Place]:
    """w with contiguous rows."""
    w = w if w.stride(1) == 1 else w.contiguous()
    return w, (w.data_ptr(), _TYPES[w.dtype], False, w.stride(0) * w.element_size(), w.shape[0])


def _forget_dead() -> None:
    for key in [key for key, pack in _packs.items() if _is_gone(pack)]:
        del _packs[key]
    while len(_packs) >= _MOST:
        del _packs[next(iter(_packs))]


def _is_gone(pack: _Pack) -> bool:
    """Whether the weight of a pack no longer exists."""
    return bool(pack.storage.expired())  # type: ignore[no-untyped-call]
