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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from weft.errors import Unsupported
from weft.fabric import _native
from weft.fabric.deadlines import nanoseconds, own_time
from weft.fabric.group.streams import Streams
from weft.fabric.group.wires import Wires

_WORD_BYTES = 16
_HELLO = struct.Struct(f"<II{_WORD_BYTES}s")
_PURPOSES = range(2)
"""What a connection is for: headers, transfers."""
_Wanted = tuple[int, int]
"""A purpose and a peer."""
_MOST_GUESTS = 64
"""The most connections of strangers, of which the oldest is closed."""
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_LOOK = 0.2
"""Seconds between two looks at whether the peers are still there."""
_TRY = 2.0
"""The longest that one attempt to reach an address takes, in seconds."""


class Door:
    """Where a rank listens for those after it."""

    def __init__(self, world: int) -> None:
        self._world = world
        try:
            self._listeners = _listeners(world)
        except OSError as failure:
            raise Unsupported(f"cannot listen for other ranks: {failure}") from None
        self._word = secrets.token_bytes(_WORD_BYTES)
        self._guests: dict[socket.socket, bytes] = {}
        """Connections that have not said all that they must, and what they have said."""

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
        until = own_time() + seconds
        made: dict[_Wanted, socket.socket] = {}
        peers = [peer for peer in range(len(cards)) if peer != rank]
        wanted = [(purpose, peer) for purpose in _PURPOSES for peer in peers]
        later = {(purpose, peer) for purpose, peer in wanted if peer > rank}
        try:
            for purpose, peer in wanted:
                if peer < rank:
                    made[purpose, peer] = _connected(rank, purpose, cards[peer], until, look)
            while len(made) < len(wanted):
                if own_time() > until:
                    missing = next(peer for purpose, peer in wanted if (purpose, peer) not in made)
                    raise Unsupported(_no_way(f"rank {missing} has not connected to it"))
                self._accept(made, later)
                look()
        except BaseException as error:
            for connection in made.values():
                connection.close()
            if isinstance(error, OSError):  # e.g. no descriptor is left
                raise Unsupported(_no_way(str(error))) from None
            raise
        for connection in made.values():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wires, streams = (
            {peer: connection for (what, peer), connection in made.items() if what == purpose}
            for purpose in _PURPOSES
        )
        return Wires(wires), Streams(streams)

    def close(self) -> None:
        for connection in (*self._listeners, *self._guests):
            connection.close()
        self._guests.clear()

    def _accept(self, made: dict[_Wanted, socket.socket], wanted: set[_Wanted]) -> None:
        """Adds the connections that ranks have made, if any come soon. A connection may take its
        time to say whose it is; others are served meanwhile."""
        open_ones = {one.fileno(): one for one in (*self._listeners, *self._guests)}
        poll = select.poll()
        for file in open_ones:
            poll.register(file, select.POLLIN)
        began = _native.now_ns()
        ready_files = poll.poll(_LOOK * 1e3)
        _native.slept(began, began + nanoseconds(_LOOK))
        for file, _ in ready_files:
            ready = open_ones[file]
            if ready in self._guests:
                self._hear(ready, made, wanted)
                continue
            with suppress(BlockingIOError, ConnectionError):  # it was given up meanwhile
                guest, _ = ready.accept()
                guest.setblocking(False)
                self._guests[guest] = b""
        while len(self._guests) > _MOST_GUESTS + 2 * self._world:
            self._dismiss(next(iter(self._guests)))

    def _hear(
        self, guest: socket.socket, made: dict[_Wanted, socket.socket], wanted: set[_Wanted]
    ) -> None:
        """Takes what a connection says, and decides about it if that is all."""
        said = self._guests[guest]
        try:
            more = guest.recv(_HELLO.size - len(said))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        said += more
        if more and len(said) < _HELLO.size:
            self._guests[guest] = said
            return
        peer, purpose, word = _HELLO.unpack(said.ljust(_HELLO.size))
        known = secrets.compare_digest(word, self._word)
        if known and (purpose, peer) in wanted and (purpose, peer) not in made:
            made[purpose, peer] = guest
            del self._guests[guest]
        else:
            self._dismiss(guest)

    def _dismiss(self, guest: socket.socket) -> None:
        del self._guests[guest]
        guest.close()


def _connected(
    rank: int,
    purpose: int,
    card: Mapping[str, Any],
    until: float,
    look: Callable[[], None],
) -> socket.socket:
    """A connection to the door of a peer. An address that does not answer is tried again, in turn
    with the others; one that refuses is not."""
    doors: dict[str, int] = dict(card["doors"])
    failures: dict[str, OSError] = {}
    while doors:
        for address, port in tuple(doors.items()):
            try:
                left = max(until - own_time(), 0.1)
                connection = socket.create_connection((address, port), timeout=min(left, _TRY))
                connection.sendall(_HELLO.pack(rank, purpose, bytes.fromhex(card["word"])))
                return connection
            except OSError as error:
                failures[address] = error
                if not isinstance(error, TimeoutError) or own_time() > until:
                    del doors[address]
            look()
    tried = ", ".join(f"{address}: {failure}" for address, failure in failures.items())
    raise Unsupported(_no_way(tried))


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
            found.append(
                socket.create_server((address, 0), family=family, backlog=_MOST_GUESTS + 2 * world)
            )
    if not found:
        found.append(socket.create_server(("127.0.0.1", 0), backlog=_MOST_GUESTS + 2 * world))
    for listener in found:
        listener.setblocking(False)
    return found


def _addresses() -> list[str]:
    """The addresses of this host, by which other machines may reach it."""
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            asked = struct.pack("256s", name[:15].encode())
            found = fcntl.ioctl(any_socket, _GET_ADDRESS, asked)
            return [socket.inet_ntoa(found[20:24])]
    try:
        entries = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # it has no address, or cannot be a name at all
        return ["127.0.0.1"]
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))
