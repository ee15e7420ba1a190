"""The connections over which headers travel: one TCP connection to every other rank.

Whichever thread waits for headers reads them. So a call whose bytes travel with its headers needs
no thread but its own: it writes to its peers and sleeps until theirs have come. Transfers have
connections of their own (`streams.py`), and threads that wait for them.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from weft.fabric import _native
from weft.fabric.deadlines import nanoseconds
from weft.fabric.group.connections import Connections
from weft.fabric.group.headers import (
    BYE,
    HEAD_BYTES,
    HEADER_BYTES,
    Header,
    read_header,
    size_of,
)
from weft.fabric.outcomes import CORRUPT, PEER_LEFT, PEER_LOST

MOST_PARTS = 512
"""The most parts of a message for one system call."""

Found = tuple[int, Header] | int
"""What came from a peer: the header of a call, or the reason why no more will come."""


class Wires(Connections):
    """The connections of one rank. `wait` may be called by any thread, and everything else by one
    thread at a time."""

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        super().__init__(sockets)
        self._inboxes = {peer: _Inbox() for peer in sockets}
        self.unsent: dict[int, bytes] = {}
        """What the network has not yet taken, by peer."""
        for wire in sockets.values():
            wire.setblocking(False)

    def send(self, peer: int, parts: Sequence[bytes | memoryview]) -> None:
        """Sends a message. What does not fit into the buffers of the network is sent by `flush`. A
        lost peer is detected when its own header does not arrive."""
        if peer in self.unsent:
            self.unsent[peer] += b"".join(parts)
            return
        some = parts if len(parts) <= MOST_PARTS else [b"".join(parts)]
        try:
            sent = self._sockets[peer].sendmsg(some)
        except BlockingIOError:
            sent = 0
        except OSError:
            return
        if sent < sum(memoryview(part).nbytes for part in some):
            self.unsent[peer] = b"".join(parts)[sent:]

    def flush(self) -> None:
        """Sends what is left, as far as the network takes it."""
        for peer in list(self.unsent):
            rest = self.unsent.pop(peer)
            try:
                rest = rest[self._sockets[peer].send(rest) :]
            except BlockingIOError:
                pass
            except OSError:
                continue
            if rest:
                self.unsent[peer] = rest

    def wait(self, peers: Collection[int], seconds: float) -> list[int]:
        """Waits until one of these peers has sent something or closed its connection, or until
        something can be sent to a peer that has not taken all; returns the peers that have."""
        events = select.POLLIN | select.POLLRDHUP
        poll, by_file = select.poll(), {}
        for peer, wire in self._sockets.items():
            sends = peer in self.unsent
            wanted = (events if peer in peers else 0) | (select.POLLOUT if sends else 0)
            if wanted and wire.fileno() >= 0:
                by_file[wire.fileno()] = peer
                poll.register(wire, wanted)
        began = _native.now_ns()
        ready = poll.poll(max(0.0, seconds) * 1e3)
        _native.slept(began, began + nanoseconds(seconds))
        return [by_file[file] for file, event in ready if event & ~select.POLLOUT]

    def read(self, peer: int) -> Found | None:
        """The next message of a peer; None if it has not come completely. Does not wait."""
        wire, inbox = self._sockets[peer], self._inboxes[peer]
        while True:
            try:
                count = wire.recv_into(inbox.room)
            except BlockingIOError:
                return None
            except OSError:
                count = 0
            found = inbox.take(count) if count else PEER_LOST
            if found is not None:
                return found


class _Inbox:
    """The message of a peer that is being read. Two buffers take turns: when the next header but
    one arrives, this rank has finished the call of this one. Pages that no payload has reached take
    no memory."""

    def __init__(self) -> None:
        self._buffers = [np.empty(HEADER_BYTES, np.uint8) for _ in range(2)]
        self._filled, self._size = 0, HEAD_BYTES

    @property
    def room(self) -> memoryview:
        """Where the next bytes go."""
        return self._buffers[0].data[self._filled : self._size]

    def take(self, count: int) -> Found | None:
        """What the message says after `count` more bytes; None if it is not complete."""
        self._filled += count
        if self._filled < self._size:
            return None
        buffer = self._buffers[0]
        if self._filled == HEAD_BYTES:
            size = size_of(buffer)
            if size is None:
                return CORRUPT
            if size > HEAD_BYTES:
                self._size = size
                return None
        header = read_header(buffer[: self._filled])
        self._filled, self._size = 0, HEAD_BYTES
        self._buffers.reverse()
        if header is None:
            return CORRUPT
        return PEER_LEFT if header[0] == BYE else header
