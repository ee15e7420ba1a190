"""loom's library, loaded at most once in a process, and the signatures of its C functions."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_char_p, c_double, c_int, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from weft.errors import Error, Unsupported

_SIGNATURES: dict[str, tuple[Any, Sequence[Any]]] = {
    "loom_error": (c_char_p, ()),
    "loom_register": (None, ()),
    "loom_register_symmetric": (None, ()),
    "loom_configure": (
        c_int,
        (*(c_int,) * 4, c_uint64, c_int, c_int, c_double, c_double, c_int, c_uint64, c_char_p),
    ),
    "loom_device_count": (c_int, ()),
    "loom_manual_seed": (None, (c_int, c_uint64)),
    "loom_rng_state": (c_uint64, (c_int, c_void_p, c_uint64)),
    "loom_set_rng_state": (None, (c_int, c_void_p, c_uint64)),
    "loom_shut_down": (None, ()),
    "loom_label": (None, (c_char_p,)),
    "loom_current_label": (c_char_p, ()),
    "loom_intern": (c_void_p, (c_char_p,)),
    "loom_origin": (None, (c_void_p,)),
    "loom_logging": (None, (c_int,)),
    "loom_log": (c_uint64, (c_void_p, c_uint64)),
    "loom_log_lost": (c_uint64, ()),
    "loom_clear_log": (None, ()),
    "loom_host_enter": (None, (c_char_p,)),
    "loom_host_leave": (None, (c_char_p, c_void_p, c_int)),
    "loom_inject_failure": (None, (c_char_p,)),
    "loom_broken": (c_int, ()),
    "loom_clear_failure": (None, ()),
    "loom_pace": (None, (c_double,)),
    "loom_deadline": (None, (c_double,)),
    "loom_mode": (None, (c_int, c_uint64)),
    "loom_stream_id": (c_int, (c_void_p,)),
    "loom_stream_priority": (c_int, (c_void_p,)),
    "loom_capturing": (c_int, (c_void_p,)),
    "loom_copy": (c_int, (c_void_p, c_void_p, c_uint64, c_void_p, c_uint64, c_uint64, c_uint64)),
    "loom_post": (c_int, (c_void_p, c_void_p, c_uint64, c_int)),
    "loom_wait": (c_int, (c_void_p, c_void_p, c_uint64, c_int, c_int)),
    "loom_sleep": (c_int, (c_void_p, c_uint64)),
    "loom_launch": (c_int, (c_void_p, c_char_p, c_void_p, c_uint64)),
    "loom_kernel_failed": (None, (c_char_p,)),
    "loom_kernel_touched": (None, (c_void_p, c_uint64, c_uint64, c_uint64, c_int)),
    "loom_kernel_saw": (None, (c_void_p, c_uint64)),
    "loom_readable": (c_void_p, (c_void_p,)),
    "loom_spin": (c_int, (c_void_p, c_void_p, c_void_p, c_uint64)),
    "loom_read_word": (c_uint64, (c_void_p,)),
    "loom_write_word": (None, (c_void_p, c_uint32)),
    "loom_rank_of": (c_int, (c_void_p,)),
}

_loaded: Library | None = None


class Library:
    """The loaded library. `calls` are its C names; `path` is for those who load vendor names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.calls = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            call = getattr(self.calls, name)
            call.restype, call.argtypes = result, list(arguments)

    def check(self, code: int) -> None:
        """Raises what a call said if it failed."""
        if code:
            raise Error(self.calls.loom_error().decode().removeprefix("loom: "))


def loaded() -> Library:
    """The library of this process."""
    if _loaded is None:
        raise Unsupported("loom is not loaded in this process; call weft.loom.load() first")
    return _loaded


def is_loaded() -> bool:
    return _loaded is not None


def open_library(path: Path) -> Library:
    global _loaded
    _loaded = Library(path)
    return _loaded
