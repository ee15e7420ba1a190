"""The driver of loom: copies by engines, posts of words and waits for them. torch has no functions
for these that work on every device.

The device fabric has such a driver for each kind of device. This one calls loom's own C functions;
the drivers of CUDA and HIP can be given loom's library (`vendor_library`) in place of the vendor's.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch

from weft.fabric.device.device_driver import AT_LEAST, Facts, pitched, stream_handle
from weft.loom.library import loaded


@dataclass(frozen=True)
class LoomDriver:
    """Copies, posts and waits on streams of loom."""

    name: str = "loom"
    pitched: bool = True

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: torch.Stream) -> None:
        """Copies a tensor of one or two dimensions by the engine of the peer that has the other
        side; rows may be apart (pitched), items of a row may not. Never converts."""
        library = loaded()
        width, rows, target_pitch, source_pitch = pitched(target, source)
        if not width or not rows:
            return
        library.check(
            library.calls.loom_copy(
                stream_handle(stream),
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
        library.check(library.calls.loom_post(stream_handle(stream), word, value, 4))

    def wait(self, word: int, value: int, stream: torch.Stream, compare: int = AT_LEAST) -> None:
        """Holds the stream until a word of 32 bits is at least (or equal to) a value."""
        library = loaded()
        library.check(library.calls.loom_wait(stream_handle(stream), word, value, 4, compare))

    def capturing(self, stream: torch.Stream) -> bool:
        return bool(loaded().calls.loom_capturing(stream_handle(stream)))

    def facts(self) -> Facts:
        from weft.loom import settings

        return Facts("loom", torch.__version__, "engine", True, settings().environment())

    def release(self, word: int, value: int) -> None:
        """Writes a word from the host, at once: a watchdog lets waits go that way."""
        loaded().calls.loom_write_word(word, value)

    def read(self, word: int) -> int:
        """Reads a word from the host, at once."""
        return int(loaded().calls.loom_read_word(word))

    def pace(self, bandwidth: float) -> None:
        """Gives the links of this rank a speed, in bytes per second; 0 is that of memory."""
        loaded().calls.loom_pace(bandwidth)

    def sleep(self, seconds: float, stream: torch.Stream) -> None:
        """A kernel that takes its time, for tests of order."""
        library = loaded()
        library.check(library.calls.loom_sleep(stream_handle(stream), int(seconds * 1e9)))

    def spin(
        self, started: torch.Tensor, go: torch.Tensor, seconds: float, stream: torch.Stream
    ) -> None:
        """A kernel that adds 1 to `started` and keeps its unit until `go` is set, for some seconds
        at most. Both are int32 tensors of the host that outlive it."""
        library = loaded()
        library.check(
            library.calls.loom_spin(
                stream_handle(stream), started.data_ptr(), go.data_ptr(), int(seconds * 1e9)
            )
        )


def vendor_library() -> ctypes.CDLL:
    """loom's library by the names of CUDA and HIP, for drivers whose library can be given."""
    return ctypes.CDLL(str(vendor_path()))


def vendor_path() -> Path:
    return loaded().path
