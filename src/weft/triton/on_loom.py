"""Interprets kernels as work of a loom stream, with every access in the log of the detector.

A launch keeps addresses and numbers, no tensors: as on a GPU, memory that the caller frees too
early is freed. When the stream comes to the kernel, its worker interprets it. Pointers stay those
of the device, which nobody may touch. Each load and store is translated to memory that the worker
may touch, and is logged at the moment it happens; a word that was seen orders what comes after it
behind whoever posted it. So a tile that is read before its chunk was seen to have arrived is found,
although the kernel is one operation.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

from weft.fabric.device.device_driver import stream_handle
from weft.loom.library import loaded
from weft.triton import interpreting
from weft.triton.jit import JitKernel

_ACQUIRES = (
    interpreter._ir.MEM_SEMANTIC.ACQUIRE,
    interpreter._ir.MEM_SEMANTIC.ACQUIRE_RELEASE,
)
_numbers = itertools.count(1)
_launches: dict[int, _Launch] = {}
_one_at_a_time = threading.Lock()  # Triton's interpreter has one state for the whole process


@dataclass(frozen=True)
class _Launch:
    """kept: whether a graph holds it, so that it runs again. There is no sign when a graph is gone;
    what is kept for it is a few numbers."""

    kernel: JitKernel
    arguments: dict[str, Any]
    programs: int
    kept: bool


def launch(kernel: JitKernel, arguments: dict[str, Any], programs: int) -> None:
    """Enqueues a kernel on the current stream."""
    library, stream = loaded(), torch.accelerator.current_stream()
    handle, number = stream_handle(stream), next(_numbers)
    kept = bool(library.calls.loom_capturing(handle))
    placed = {name: _placed(value) for name, value in arguments.items()}
    _launches[number] = _Launch(kernel, placed, programs, kept)
    name = kernel.fn.__name__.encode()
    library.check(library.calls.loom_launch(handle, name, _entry, number))


def _placed(value: Any) -> Any:
    """For a tensor, one that has its address and type, but neither holds nor touches its memory."""
    if not isinstance(value, torch.Tensor):
        return value
    if not value.numel():
        return torch.empty(1, dtype=value.dtype)
    size = value.element_size()
    memory = (ctypes.c_char * size).from_address(value.data_ptr())
    return torch.frombuffer(memory, dtype=value.dtype)


def _run(number: int) -> None:
    """Called by the worker of a stream. Whatever is raised here fails the device."""
    calls = loaded().calls
    try:
        found = _launches[number]
        if not found.kept:
            del _launches[number]
        with _one_at_a_time, interpreting.watched(lambda: not calls.loom_broken()), _traced():
            found.kernel.interpreted[(found.programs,)](**found.arguments)
    except BaseException as error:
        calls.loom_kernel_failed(f"{type(error).__name__}: {error}".encode())


_callback = ctypes.CFUNCTYPE(None, ctypes.c_uint64)(_run)
_entry = ctypes.cast(_callback, ctypes.c_void_p)


@contextmanager
def _traced() -> Iterator[None]:
    """In this context the interpreter takes pointers of the device, and logs what it touches."""
    builder, traced = interpreter.interpreter_builder, _Traced()
    own = ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas")
    for name in own:
        setattr(builder, name, getattr(traced, name))
    try:
        yield
    finally:
        for name in own:
            delattr(builder, name)


class _Traced:
    """The accesses of an interpreted kernel."""

    def __init__(self) -> None:
        self._calls = loaded().calls
        self._builder = interpreter.interpreter_builder
        self._plain = type(self._builder)
        self._seen: dict[int, int] = {}

    def create_masked_load(self, ptrs: Any, mask: Any, *more: Any) -> Any:
        there = self._touched(ptrs, mask.data, False)
        return self._plain.create_masked_load(self._builder, there, mask, *more)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *more: Any) -> Any:
        there = self._touched(ptrs, mask.data, True)
        return self._plain.create_masked_store(self._builder, there, value, mask, *more)

    def create_atomic_cas(self, ptr: Any, *more: Any) -> Any:
        there = self._touched(ptr, np.ones_like(ptr.data, dtype=bool), True)
        return self._plain.create_atomic_cas(self._builder, there, *more)

    def create_atomic_rmw(
        self, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, *more: Any
    ) -> Any:
        rmw = self._plain.create_atomic_rmw
        if sem in _ACQUIRES and not val.data.any():  # a poll: nothing is written
            found = rmw(self._builder, op, self._there(ptr), val, mask, sem, *more)
            self._saw(int(ptr.data.flat[0]), int(found.data.flat[0]))
            return found
        there = self._touched(ptr, mask.data, True)
        return rmw(self._builder, op, there, val, mask, sem, *more)

    def _saw(self, word: int, value: int) -> None:
        if self._seen.get(word) != value:
            self._seen[word] = value
            self._calls.loom_kernel_saw(word, value)

    def _touched(self, ptrs: Any, mask: Any, write: bool) -> Any:
        size = np.dtype(interpreter._get_np_dtype(ptrs.get_element_ty())).itemsize
        places = rectangle(ptrs.data, mask, size)
        if places is not None:
            self._calls.loom_kernel_touched(*places, write)
        return self._there(ptrs)

    def _there(self, ptrs: Any) -> Any:
        """The same pointers, to memory that this thread may touch."""
        base = int(ptrs.data.flat[0])
        moved = self._calls.loom_readable(base) - base
        data = (ptrs.data.astype(np.int64) + moved).astype(np.uint64)
        return interpreter.TensorHandle(data, ptrs.dtype)


def rectangle(pointers: Any, mask: Any, size: int) -> tuple[int, int, int, int] | None:
    """(first byte, width, rows, pitch) of the items that a mask selects, or of a little more if
    they are not adjacent in either direction; None if there are none. Masks of tiles select
    rectangles."""
    if not mask.any():
        return None
    if pointers.ndim < 2:
        some = pointers[mask]
        low = int(some.min())
        return low, int(some.max()) - low + size, 1, 0
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    part = pointers[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].astype(np.int64)
    down = int(part[1, 0] - part[0, 0]) if len(part) > 1 else 0
    across = int(part[0, 1] - part[0, 0]) if part.shape[1] > 1 else size
    if 0 < down < across:
        part, down, across = part.T, across, down
    width = (part.shape[1] - 1) * across + size
    return int(part[0, 0]), width, part.shape[0], down
