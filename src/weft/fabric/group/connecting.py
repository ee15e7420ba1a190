"""Connects a rank to all others: every rank listens, and connects to those before it. Each pair has
a connection for headers (`wires.py`) and one for transfers (`streams.py`).

A rank listens only on the addresses that gloo would use: of the interface GLOO_SOCKET_IFNAME, or of
the host's name. A connection begins with the rank that made it, what it is for, and the word of the
rank that listens, which only ranks of the group know.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from weft.errors import Unsupported
from weft.fabric.group.streams import Streams
from weft.fabric.group.wires import Wires

_WORD_BYTES = 16
_HELLO = struct.Struct(f"<II{_WORD_BYTES}s")
_PURPOSES = range(2)
"""What a connection is for: headers, transfers."""
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_LOOK = 0.2
"""Seconds between two looks at whether the peers are still there."""


class Door:
    """Where a rank listens for those after it."""

    def __init__(self, world: int) -> None:
        self._listeners = _listeners(world)
        self._word = secrets.token_bytes(_WORD_BYTES)

    @property
    def card(self) -> dict[str, Any]:
        """What peers must know to connect."""
        doors = [listener.getsockname()[:2] for listener in self._listeners]
        return {"doors": doors, "word": self._word.hex()}

    def connect(
        self,
        rank: int,
        cards: Sequence[Mapping[str, Any]],
        seconds: float,
        look: Callable[[], None],
    ) -> tuple[Wires, Streams]:
        """The connections to all other ranks. cards: those of all ranks. look: raises if a peer is
        lost; called while this waits."""
        until = time.monotonic() + seconds
        made: dict[tuple[int, int], socket.socket] = {}
        wanted = [(purpose, peer) for purpose in _PURPOSES for peer in range(len(cards))]
        wanted = [(purpose, peer) for purpose, peer in wanted if peer != rank]
        try:
            for purpose, peer in wanted:
                if peer < rank:
                    made[purpose, peer] = _connected(rank, purpose, cards[peer], until)
            while len(made) < len(wanted):
                if time.monotonic() > until:
                    missing = next(peer for purpose, peer in wanted if (purpose, peer) not in made)
                    raise Unsupported(_no_way(f"rank {missing} has not connected to it"))
                self._accept(made, rank, len(cards))
                look()
        except BaseException:
            for connection in made.values():
                connection.close()
            raise
        for connection in made.values():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wires, streams = (
            {peer: connection for (what, peer), connection in made.items() if what == purpose}
            for purpose in _PURPOSES
        )
        return Wires(wires), Streams(streams)

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()

    def _accept(self, made: dict[tuple[int, int], socket.socket], rank: int, world: int) -> None:
        """Adds the next connection that a rank makes, if one does soon."""
        ready, _, _ = select.select(self._listeners, [], [], _LOOK)
        if not ready:
            return
        with suppress(OSError):
            connection, _ = ready[0].accept()
            connection.settimeout(_LOOK)
            hello = connection.recv(_HELLO.size, socket.MSG_WAITALL).ljust(_HELLO.size)
            peer, purpose, word = _HELLO.unpack(hello)
            known = secrets.compare_digest(word, self._word)
            if known and rank < peer < world and purpose in _PURPOSES:
                made[purpose, peer] = connection
            else:
                connection.close()


def _connected(rank: int, purpose: int, card: Mapping[str, Any], until: float) -> socket.socket:
    """A connection to the door of a peer."""
    failure: OSError | None = None
    for address, port in card["doors"]:
        try:
            left = max(until - time.monotonic(), 0.1)
            connection = socket.create_connection((address, port), timeout=left)
            connection.sendall(_HELLO.pack(rank, purpose, bytes.fromhex(card["word"])))
        except OSError as error:
            failure = error
        else:
            return connection
    addresses = ", ".join(address for address, _ in card["doors"])
    raise Unsupported(_no_way(f"{addresses}: {failure}"))


def _no_way(why: str) -> str:
    return (
        f"has no way over the network to all other ranks ({why}); see whether its host name "
        "resolves to an address that they reach, or name the interface with GLOO_SOCKET_IFNAME"
    )


def _listeners(world: int) -> list[socket.socket]:
    found = []
    for address in _addresses():
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with suppress(OSError):  # the name has an address that this host does not
            found.append(socket.create_server((address, 0), family=family, backlog=2 * world))
    return found or [socket.create_server(("127.0.0.1", 0), backlog=2 * world)]


def _addresses() -> list[str]:
    """The addresses of this host, by which other machines may reach it."""
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            asked = struct.pack("256s", name[:15].encode())
            found = fcntl.ioctl(any_socket, _GET_ADDRESS, asked)
            return [socket.inet_ntoa(found[20:24])]
    try:
        entries = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return ["127.0.0.1"]
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))
