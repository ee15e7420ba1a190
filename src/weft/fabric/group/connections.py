"""The TCP connections of one rank to all others, for headers (`wires.py`) or for transfers
(`streams.py`)."""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Mapping
from contextlib import suppress


class Connections:
    """One connection to every other rank."""

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._sockets = dict(sockets)
        _open.add(self)

    def close(self) -> None:
        """Closes all connections, for both sides. Nobody sleeps on them any more."""
        for connection in self._sockets.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """Closes the files, and leaves the connections to the parent of this process."""
        for connection in self._sockets.values():
            connection.close()


_open: weakref.WeakSet[Connections] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child is no rank. If it held the connections, peers would not notice that its parent
    died."""
    for connections in _open:
        connections.forget()


os.register_at_fork(after_in_child=_close_in_child)
