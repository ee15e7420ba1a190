"""Connects the wires of a rank (`wires.py`): every rank listens, and connects to those before it.

A rank listens only on the addresses that gloo would use: of the interface GLOO_SOCKET_IFNAME, or of
the host's name. A connection begins with the rank that made it and with the word of the rank that
listens, which only ranks of the group know.
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
from weft.fabric.group.wires import Wires

_WORD_BYTES = 16
_HELLO = struct.Struct(f"<I{_WORD_BYTES}s")
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
    ) -> Wires:
        """The wires to all other ranks. cards: those of all ranks. look: raises if a peer is lost;
        called while this waits."""
        until = time.monotonic() + seconds
        wires: dict[int, socket.socket] = {}
        try:
            for peer in range(rank):
                wires[peer] = _connected(rank, cards[peer], until)
            while len(wires) < len(cards) - 1:
                if time.monotonic() > until:
                    missing = next(r for r in range(rank + 1, len(cards)) if r not in wires)
                    raise Unsupported(_no_way(f"rank {missing} has not connected to it"))
                self._accept(wires, rank, len(cards))
                look()
        except BaseException:
            for wire in wires.values():
                wire.close()
            raise
        for wire in wires.values():
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Wires(wires)

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()

    def _accept(self, wires: dict[int, socket.socket], rank: int, world: int) -> None:
        """Adds the next rank that connects, if one does soon."""
        ready, _, _ = select.select(self._listeners, [], [], _LOOK)
        if not ready:
            return
        with suppress(OSError):
            wire, _ = ready[0].accept()
            wire.settimeout(_LOOK)
            peer, word = _HELLO.unpack(
                wire.recv(_HELLO.size, socket.MSG_WAITALL).ljust(_HELLO.size)
            )
            if secrets.compare_digest(word, self._word) and rank < peer < world:
                wires[peer] = wire
            else:
                wire.close()


def _connected(rank: int, card: Mapping[str, Any], until: float) -> socket.socket:
    """A connection to the door of a peer."""
    failure: OSError | None = None
    for address, port in card["doors"]:
        try:
            left = max(until - time.monotonic(), 0.1)
            wire = socket.create_connection((address, port), timeout=left)
            wire.sendall(_HELLO.pack(rank, bytes.fromhex(card["word"])))
        except OSError as error:
            failure = error
        else:
            return wire
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
            found.append(socket.create_server((address, 0), family=family, backlog=world))
    return found or [socket.create_server(("127.0.0.1", 0), backlog=world)]


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
