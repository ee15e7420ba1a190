"""What torch cannot say for every device: engine copies, and posts of and waits for words.

A `Driver` does it for one kind of device: `cuda.py`, `hip.py`, and `weft.loom.driver`. Everything
else (streams, events, products, sums, graphs) is plain torch, so one source serves all devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from weft.errors import Unsupported

AT_LEAST, EQUAL = 0, 1
"""How `Driver.wait` compares a word with the value that it waits for."""


@dataclass(frozen=True)
class Facts:
    """What a driver knows of its device.

    name: cuda, hip or loom. version: that of the runtime. copies: who copies between peers, as
    far as versions and environment tell: engine, kernel, or "unknown". stream_words: whether
    streams can wait for words. environment: the variables that change who copies, where they are
    set. versions: those of the runtime and the driver. peers: which device reaches which; empty if
    unknown. attributes: numbers of the device, such as its copy engines. limits: what this driver
    refuses or cannot promise, each with its reason.
    """

    name: str
    version: str
    copies: str
    stream_words: bool
    environment: Mapping[str, str]
    versions: Mapping[str, str] = field(default_factory=dict)
    peers: tuple[tuple[bool, ...], ...] = ()
    attributes: Mapping[str, int] = field(default_factory=dict)
    limits: tuple[str, ...] = ()


class Driver(Protocol):
    """Copies, posts and waits on the streams of one kind of device.

    Words have 32 bits, are aligned to 4 bytes, and are given by their address on this device; a
    peer's word is given by the address of this process's view of it.
    """

    @property
    def name(self) -> str:
        """cuda, hip or loom."""

    @property
    def pitched(self) -> bool:
        """Whether engines copy matrices whose rows are apart."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: torch.Stream) -> None:
        """Enqueues a copy of a contiguous tensor, or of a matrix whose rows are apart (pitched).
        An engine makes it; where only a kernel could, it raises `Unsupported` with the reason.
        Shapes and dtypes are equal. The caller keeps both tensors until the stream is through."""

    def post(self, word: int, value: int, stream: torch.Stream) -> None:
        """Enqueues the write of a word, of this rank or a peer. Whoever sees the value also sees
        everything that the stream did before."""

    def wait(self, word: int, value: int, stream: torch.Stream, compare: int = AT_LEAST) -> None:
        """Holds the stream until a word of this rank is at least (or equal to) a value. In a
        captured program the value is a constant, so the wait is for EQUAL and is followed by a
        post of 0 to the same word."""

    def capturing(self, stream: torch.Stream) -> bool:
        """Whether the stream records into a graph."""

    def facts(self) -> Facts: ...

    def release(self, word: int, value: int) -> None:
        """Writes a word of this rank from the host, at once, whatever the streams do: a watchdog
        ends waits that way."""

    def read(self, word: int) -> int:
        """Reads a word of this rank from the host, at once, whatever the streams do."""


_makers: dict[str, Callable[[torch.device], Driver]] = {}


def register(device: str, maker: Callable[[torch.device], Driver]) -> None:
    """Registers the driver of a type of device."""
    _makers[device] = maker


@functools.cache
def driver_of(device: torch.device) -> Driver:
    """The driver of a device, one for each. Raises `Unsupported` if there is none."""
    if device.type not in _makers:
        raise Unsupported(
            f"weft has no driver for {device.type} devices; "
            f"use tensors on {' or '.join(['cpu', *_makers])}"
        )
    return _makers[device.type](device)


def _of_cuda(device: torch.device) -> Driver:
    """torch calls ROCm's devices cuda as well."""
    index = torch.cuda.current_device() if device.index is None else device.index
    if torch.version.hip:
        from weft.fabric.device.hip import HipDriver

        return HipDriver(index)
    from weft.fabric.device.cuda import CudaDriver

    return CudaDriver(index)


register("cuda", _of_cuda)


def stream_handle(stream: torch.Stream) -> int:
    """What C calls know a stream by."""
    handle: Any = getattr(stream, "native_handle", None)
    return int(getattr(stream, "cuda_stream", 0) if handle is None else handle)


def pitched(target: torch.Tensor, source: torch.Tensor) -> tuple[int, int, int, int]:
    """The shape of a copy: bytes of a row, rows, and the distance of rows in target and source.
    Contiguous tensors are one row. Raises `Unsupported` for what no engine copies."""
    if target.dtype != source.dtype or target.shape != source.shape:
        raise Unsupported(
            f"an engine copies equal tensors, not {tuple(source.shape)} of {source.dtype} "
            f"to {tuple(target.shape)} of {target.dtype}"
        )
    size = target.element_size()
    if target.is_contiguous() and source.is_contiguous():
        num_bytes = target.numel() * size
        return num_bytes, 1, num_bytes, num_bytes
    if target.dim() != 2 or any(t.shape[1] > 1 and t.stride(1) != 1 for t in (target, source)):
        raise Unsupported(
            "an engine copies contiguous tensors, or rows of a matrix whose items are adjacent; "
            f"these have strides {tuple(source.stride())} and {tuple(target.stride())}"
        )
    rows, columns = target.shape
    return columns * size, rows, target.stride(0) * size, source.stride(0) * size
