"""Which line of a program issued an operation: asked by the library when the log is on."""

from __future__ import annotations

import ctypes
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

import torch

from weft.loom.library import Library

_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_void_p)
_INSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<frozen")

_known: dict[tuple[CodeType, int], int] = {}
_keep: list[object] = []


def install(library: Library) -> None:
    """From now on every logged operation names the line of the program that issued it."""
    main = threading.main_thread().ident

    def here() -> int:
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
            frame = frame.f_back
        if frame is None and threading.get_ident() != main:
            # A thread of torch's own, such as autograd's: what the program does meanwhile.
            frame = sys._current_frames().get(main or 0)
            while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
                frame = frame.f_back
        if frame is None:
            return int(library.calls.loom_intern(b"") or 0)
        key = (frame.f_code, frame.f_lineno)
        if key not in _known:
            line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            _known[key] = library.calls.loom_intern(line.encode())
        return _known[key]

    callback = _CALLBACK(here)
    _keep.append(callback)
    library.calls.loom_origin(ctypes.cast(callback, ctypes.c_void_p))
