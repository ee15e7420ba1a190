"""The connections over which transfers travel: one TCP connection to every other rank.

Both ends of a connection make their transfers in the order of the plan, and nothing moves before
all headers agree. So the bytes need no headers of their own. A thread sleeps in the kernel until
its bytes have arrived or left; they go from the memory of one rank into that of the other.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Mapping

from weft.fabric import _native
from weft.fabric.group.connections import Connections

_LOOK_NS = 50_000_000
"""The longest sleep in the kernel, in nanoseconds."""

GoOn = Callable[[], None]
"""Called after every sleep; raises if a transfer must end."""


class Lost(Exception):
    """The connection is closed."""


class Streams(Connections):
    """The connections of one rank. Of each, one thread at a time may send and one receive."""

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        super().__init__(sockets)
        longest = struct.pack("@ll", 0, _LOOK_NS // 1000)  # a timeval
        for stream in sockets.values():
            stream.setblocking(True)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, longest)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, longest)

    def send(self, peer: int, data: memoryview, go_on: GoOn) -> None:
        """Sends bytes; returns when the network has taken all."""
        stream = self._sockets[peer]
        while data:
            began = _native.now_ns()
            try:
                data = data[stream.send(data) :]
            except BlockingIOError:
                pass
            except OSError:
                raise Lost from None
            if data:
                _native.slept(began, began + _LOOK_NS)
                go_on()

    def receive(self, peer: int, room: memoryview, go_on: GoOn) -> None:
        """Fills a memory with the next bytes of a peer."""
        stream = self._sockets[peer]
        while room:
            began = _native.now_ns()
            try:
                count = stream.recv_into(room, 0, socket.MSG_WAITALL)
                if not count:
                    raise Lost
                room = room[count:]
            except BlockingIOError:
                pass
            except OSError:
                raise Lost from None
            if room:
                _native.slept(began, began + _LOOK_NS)
                go_on()
