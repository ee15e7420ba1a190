"""The points of the group fabric: the statements of its Python code at which a rank waits for its
peers or informs them. They are found in the source, and a rank that is traced sends itself a signal
at one of them, so the code itself knows nothing of them."""

from __future__ import annotations

import ast
import os
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from weft.fabric.group import network_native, streams, transfers, wires

FILES = {module.__file__: module for module in (network_native, streams, transfers, wires)}

INFORMS = (
    *(".sendmsg", "_sockets[peer].send", "stream.send", ".recv_into", "poll.poll"),
    *("changed.wait", "changed.wait_for"),
    *(f"{native}.{name}" for native in ("inner", "self.native")
      for name in ("enter", "launch", "wait", "wait_doorbell", "signal", "done", "finish",
                   "wait_released")),
)  # fmt: skip
"""How the calls end that wait for a peer or inform it."""

WITHOUT = {}


def _found(node: ast.AST, inside: tuple[str, ...] = (), line: int = 0) -> Iterator[tuple[str, int]]:
    """The points in a part of a file: a name, and the line of the statement."""
    for child in ast.iter_child_nodes(node):
        at = child.lineno if isinstance(child, ast.stmt) else line
        named = isinstance(child, (ast.ClassDef, ast.FunctionDef))
        within = (*inside, child.name) if named else inside
        if isinstance(child, ast.Call):
            called = ast.unparse(child.func)
            if called.endswith(INFORMS):
                yield f"{'.'.join(inside)} {called}", at
        yield from _found(child, within, at)


def _points() -> dict[str, tuple[str, int]]:
    """All points by name, with their files and lines. The second of one name has a number."""
    points: dict[str, tuple[str, int]] = {}
    for file in FILES:
        with open(file) as source:
            tree = ast.parse(source.read())
        for name, line in _found(tree):
            number = 1 + sum(known.split(" #")[0] == name for known in points)
            points[name if number == 1 else f"{name} #{number}"] = file, line
    return {name: place for name, place in points.items() if name not in WITHOUT}


POINTS = _points()

_trap: list[Any] = [None, 0]
"""The place, and the signal that this process sends itself there; once."""


def watch() -> None:
    """Traces the code of the group fabric in this thread, and in those that start from now on."""
    sys.settrace(_enter)
    threading.settrace(_enter)


def set_trap(point: str | None, number: int) -> None:
    _trap[:] = (None, 0) if point is None else (POINTS[point], number)


def _enter(frame: FrameType, event: str, argument: Any) -> Any:
    return _step if frame.f_code.co_filename in FILES else None


def _step(frame: FrameType, event: str, argument: Any) -> Any:
    if event == "line" and _trap[0] == (frame.f_code.co_filename, frame.f_lineno):
        number, _trap[:] = _trap[1], (None, 0)
        os.kill(os.getpid(), number)
    return _step
