"""Connections for headers and for transfers, without ranks: both ends are in this process."""

from __future__ import annotations

import socket
import threading
import time

import numpy as np
import pytest

from weft.errors import Unsupported
from weft.fabric import _native
from weft.fabric.group.connecting import Door
from weft.fabric.group.eager import MOST_BYTES
from weft.fabric.group.headers import BYE, HEADER_BYTES, write_header
from weft.fabric.group.streams import Lost, Streams
from weft.fabric.group.wires import MOST_PARTS, Wires
from weft.fabric.outcomes import CORRUPT, PEER_LEFT, PEER_LOST


@pytest.fixture
def ends():
    """The two ends of a connection: what rank 0 has of rank 1, and the other way round."""
    one, other = socket.socketpair()
    made = Wires({1: one}), Wires({0: other})
    yield made
    for wires in made:
        wires.close()
        wires.forget()


def _next(wires, peer, sender=None):
    """The next message; the sender sends what is left meanwhile."""
    while (found := wires.read(peer)) is None:
        if sender is not None:
            sender.flush()
        assert wires.wait([peer], 10.0) or sender is not None
    return found


def test_messages_come_as_they_were_sent(ends):
    near, far = ends
    assert far.read(0) is None
    near.send(1, [write_header(7, 2**64 - 1, b"blob")])
    near.send(1, [write_header(8, 3, b"")])
    assert far.wait([0], 10.0) == [0]
    call, header = _next(far, 0)
    assert (call, header.signature, header.blob, header.eager) == (7, 2**64 - 1, b"blob", 0)
    assert _next(far, 0)[0] == 8
    assert far.read(0) is None
    assert far.wait([0], 0.0) == []


@pytest.mark.parametrize("parts", [1, 7, MOST_PARTS + 1])
def test_what_the_network_does_not_take_at_once_follows(ends, parts):
    """Both ranks send more than fits into the buffers of the connection before one of them reads,
    and the bytes of one call stay while the header of the next arrives."""
    near, far = ends
    payload = np.random.default_rng(1).integers(0, 256, MOST_BYTES, np.uint8)
    for sender, peer in ((near, 1), (far, 0)):
        head = write_header(1, 2, b"x" * _native.MAX_BLOB, 3, payload.nbytes)
        sender.send(peer, [head, *(part.data for part in np.array_split(payload, parts))])
        sender.send(peer, [write_header(2, 5, b"next")])
    assert near.unsent, "this test should fill the connection"
    for reader, peer, sender in ((far, 0, near), (near, 1, far)):
        call, header = _next(reader, peer, sender)
        assert call == 1
        assert _next(reader, peer, sender)[1].blob == b"next"
        assert np.array_equal(header.payload, payload)
    assert not near.unsent
    assert not far.unsent


def test_a_peer_that_leaves_is_told_from_one_that_is_lost(ends):
    near, far = ends
    near.send(1, [write_header(9, 1, b"")])
    near.send(1, [write_header(BYE, 0, b"")])
    near.close()
    assert far.wait([0], 10.0) == [0]
    assert _next(far, 0)[0] == 9
    assert _next(far, 0) == PEER_LEFT
    assert _next(far, 0) == PEER_LOST
    far.send(0, [write_header(10, 1, b"")])  # to nobody, which is no error here
    assert not far.unsent


def test_what_is_no_header_is_corrupt(ends):
    near, far = ends
    near.send(1, [b"\xff" * HEADER_BYTES])
    assert _next(far, 0, near) == CORRUPT


def _connect(doors, seconds=10.0):
    """What every rank gets when all of them connect."""
    found = [None] * len(doors)
    cards = [door.card for door in doors]

    def connect(rank):
        try:
            found[rank] = doors[rank].connect(rank, cards, seconds, lambda: None)
        except Unsupported as error:
            found[rank] = error

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(len(doors))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_every_rank_has_a_wire_to_every_other():
    doors = [Door(3) for _ in range(3)]
    # A stranger that knows the port, but not the word.
    with socket.create_connection(doors[0].card["doors"][0]) as stranger:
        stranger.sendall(b"\x01\x00\x00\x00" + b"guess" * 4)
        made = [wires for wires, _ in _connect(doors)]
    for rank, wires in enumerate(made):
        for peer in {0, 1, 2} - {rank}:
            wires.send(peer, [write_header(10 * rank + peer + 1, 1, b"")])
    for rank, wires in enumerate(made):
        for peer in {0, 1, 2} - {rank}:
            assert _next(wires, peer)[0] == 10 * peer + rank + 1
        wires.close()
        wires.forget()
    for door in doors:
        door.close()


def test_a_rank_listens_on_the_named_interface_only(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    door = Door(2)
    assert [address for address, _ in door.card["doors"]] == ["127.0.0.1"]
    door.close()


def test_no_way_to_a_peer_is_said():
    door, closed = Door(2), Door(2)
    card = closed.card
    closed.close()
    with pytest.raises(Unsupported, match="GLOO_SOCKET_IFNAME"):
        door.connect(1, [card, door.card], 5.0, lambda: None)
    with pytest.raises(Unsupported, match="rank 1 has not connected"):
        door.connect(0, [door.card, card], 0.1, lambda: None)
    door.close()


class _Enough(Exception):
    pass


def test_a_stream_that_trickles_is_looked_after():
    """A transfer can be ended while bytes still come, one by one."""
    here, there = socket.socketpair()
    streams, over = Streams({1: here}), threading.Event()

    def trickle():
        while not over.wait(0.01):
            there.send(b"x")

    sender = threading.Thread(target=trickle)
    sender.start()
    looks = []

    def go_on():
        looks.append(time.monotonic())
        if len(looks) == 3:
            raise _Enough

    began = time.monotonic()
    try:
        with pytest.raises(_Enough):
            streams.receive(1, memoryview(bytearray(1 << 20)), go_on)
    finally:
        over.set()
        sender.join()
        there.close()
    assert time.monotonic() - began < 10


def test_a_stream_whose_peer_takes_nothing_is_looked_after():
    here, there = socket.socketpair()
    streams = Streams({1: here})

    def go_on():
        raise _Enough

    with pytest.raises(_Enough):
        streams.send(1, memoryview(bytes(64 << 20)), go_on)
    there.close()
    with pytest.raises(Lost):
        streams.receive(1, memoryview(bytearray(1)), go_on)
