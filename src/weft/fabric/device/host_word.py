"""Words of a device that the host reads and writes while every stream may be waiting.

A watchdog ends waits this way. Copies go over a stream of their own, which waits for no other
stream; nothing here waits for the device.
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import AbstractContextManager
from typing import Protocol


class WordCopies(Protocol):
    """Copies between the host and the device on a stream, and the stream itself."""

    def open_stream(self) -> int:
        """A stream that is not ordered with any other, of the highest priority."""

    def to_device(self, word: int, host: int, stream: int) -> None: ...

    def to_host(self, host: int, word: int, stream: int) -> None: ...

    def finish(self, stream: int) -> None: ...

    def entered(self) -> AbstractContextManager[None]:
        """Inside, the device is current in this thread, and this thread may call while another
        one captures."""


class HostWords:
    """Reads and writes words of 32 bits through `WordCopies`. The stream is opened at first use."""

    def __init__(self, copies: WordCopies) -> None:
        self._copies, self._stream = copies, 0
        self._lock = threading.Lock()

    def write(self, word: int, value: int) -> None:
        self._transfer(word, value & 0xFFFFFFFF, True)

    def read(self, word: int) -> int:
        return self._transfer(word, 0, False)

    def _transfer(self, word: int, value: int, to_device: bool) -> int:
        held = ctypes.c_uint32(value)
        host = ctypes.addressof(held)
        with self._lock, self._copies.entered():
            if not self._stream:
                self._stream = self._copies.open_stream()
            if to_device:
                self._copies.to_device(word, host, self._stream)
            else:
                self._copies.to_host(host, word, self._stream)
            self._copies.finish(self._stream)
        return held.value
