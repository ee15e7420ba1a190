"""What torch cannot say for every device, said to loom: engine copies, posts and waits of words.

The device fabric has such a driver for each kind of device. This one calls loom's own C names; the
drivers of CUDA and HIP can be given loom's library (`vendor_library`) in place of the vendor's.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch

from weft.errors import Unsupported
from weft.loom.library import handle, loaded

AT_LEAST, EQUAL = 0, 1


@dataclass(frozen=True)
class Facts:
    """What a driver knows of its device. copies: who copies between peers."""

    name: str
    version: str
    copies: str
    stream_words: bool
    environment: dict[str, str]


@dataclass(frozen=True)
class LoomDriver:
    """Copies, posts and waits on streams of loom."""

    name: str = "loom"

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: torch.Stream) -> None:
        """Copies a tensor of one or two dimensions by the engine of the peer that has the other
        side; rows may be apart (pitched), items of a row may not. Never converts."""
        library = loaded()
        if target.dtype != source.dtype or target.shape != source.shape:
            raise Unsupported(
                f"an engine copies equal tensors, not {tuple(source.shape)} of {source.dtype} "
                f"to {tuple(target.shape)} of {target.dtype}"
            )
        width, rows, target_pitch, source_pitch = _pitched(target, source)
        library.check(
            library.calls.loom_copy(
                handle(stream),
                target.data_ptr(),
                target_pitch,
                source.data_ptr(),
                source_pitch,
                width,
                rows,
            )
        )

    def post(self, word: int, value: int, stream: torch.Stream) -> None:
        """Writes a word of 32 bits, of this rank or a peer, after all before it on the stream."""
        library = loaded()
        library.check(library.calls.loom_post(handle(stream), word, value, 4))

    def wait(self, word: int, value: int, stream: torch.Stream, compare: int = AT_LEAST) -> None:
        """Holds the stream until a word of 32 bits is at least (or equal to) a value."""
        library = loaded()
        library.check(library.calls.loom_wait(handle(stream), word, value, 4, compare))

    def capturing(self, stream: torch.Stream) -> bool:
        return bool(loaded().calls.loom_capturing(handle(stream)))

    def facts(self) -> Facts:
        from weft.loom import settings

        return Facts("loom", torch.__version__, "engine", True, settings().environment())

    def release(self, word: int, value: int) -> None:
        """Writes a word from the host, at once: a watchdog lets waits go that way."""
        loaded().calls.loom_write_word(word, value)

    def read(self, word: int) -> int:
        """Reads a word from the host, at once."""
        return int(loaded().calls.loom_read_word(word))

    def sleep(self, seconds: float, stream: torch.Stream) -> None:
        """A kernel that takes its time, for tests of order."""
        library = loaded()
        library.check(library.calls.loom_sleep(handle(stream), int(seconds * 1e9)))


def vendor_library() -> ctypes.CDLL:
    """loom's library by the names of CUDA and HIP, for drivers whose library can be given."""
    return ctypes.CDLL(str(vendor_path()))


def vendor_path() -> Path:
    return loaded().path


def _pitched(target: torch.Tensor, source: torch.Tensor) -> tuple[int, int, int, int]:
    """Bytes of a row, rows, and the distance of rows on both sides."""
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
