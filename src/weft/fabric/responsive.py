"""Threads that mostly sleep, and should run at once when they wake; and how a compute thread keeps
its core while it hands something to them. Where the kernel knows nothing of this, nothing changes.
"""

from __future__ import annotations

import ctypes
import platform
import threading

_SLICE_NS = 100_000
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}.get(platform.machine())
_PR_SET_TIMERSLACK = 29

_libc = ctypes.PyDLL(None)  # what takes a microsecond need not give up Python's lock


class _Attributes(ctypes.Structure):
    """The kernel's struct sched_attr. For a thread of the usual policy, 0, runtime is its slice."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


class _Slice(threading.local):
    """The slice of the thread that asks."""

    def __init__(self) -> None:
        self.usual, self.short = _Attributes(), _Attributes()
        self._at = [ctypes.byref(self.usual), ctypes.byref(self.short)]
        self.shortened = False

    def shorten(self) -> bool:
        """Whether the slice is short now, and can be made the usual one again."""
        usual, short = self.usual, self.short
        if _SCHED_SETATTR is None or not self._read() or usual.policy:
            return False
        ctypes.memmove(self._at[1], self._at[0], ctypes.sizeof(_Attributes))
        short.runtime = _SLICE_NS
        return not _libc.syscall(_SCHED_SETATTR, 0, self._at[1], 0)

    def restore(self) -> None:
        _libc.syscall(_SCHED_SETATTR, 0, self._at[0], 0)

    def _read(self) -> bool:
        assert _SCHED_SETATTR is not None
        size = ctypes.sizeof(_Attributes)
        return not _libc.syscall(_SCHED_SETATTR + 1, 0, self._at[0], size, 0)


_own = _Slice()


def become_responsive() -> None:
    """Asks for exact timers and a short slice, as engines do: a thread that mostly sleeps should
    run at once when it wakes."""
    _libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)
    _own.shorten()


class Uninterrupted:
    """`with uninterrupted:` for the microseconds in which a compute thread posts a transfer. gloo
    holds a lock then. Its own thread, which runs at once when something comes, would take the core
    and spin on that lock until the next tick; from a thread with as short a slice it does not."""

    def __enter__(self) -> None:
        _own.shortened = _own.shorten()

    def __exit__(self, *exception: object) -> None:
        if _own.shortened:
            _own.restore()


uninterrupted = Uninterrupted()
