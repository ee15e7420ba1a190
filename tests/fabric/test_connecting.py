"""How ranks on several machines connect: late, odd and hostile connections, addresses that do not
answer, and a process without descriptors."""

from __future__ import annotations

import errno
import os
import resource
import socket
import threading
import time
from contextlib import closing

import pytest
import torch.distributed as dist
from ranks import check_call

from weft import Unsupported
from weft.fabric.group import connecting
from weft.fabric.group.connecting import Door


def greeting(door: Door, purpose: int) -> bytes:
    return connecting._HELLO.pack(1, purpose, bytes.fromhex(door.card["word"]))


def guest(door: Door) -> socket.socket:
    return socket.create_connection(tuple(door.card["doors"][0]), timeout=20)


def test_a_greeting_may_come_late_and_in_pieces():
    with closing(Door(2)) as door, closing(guest(door)) as first, closing(guest(door)) as second:
        said = greeting(door, 0)
        first.sendall(said[:10])
        looks = []

        def look():
            looks.append(time.monotonic())
            if len(looks) == 3:
                first.sendall(said[10:])
                second.sendall(greeting(door, 1))

        for connections in door.connect(0, [door.card, {}], 20.0, look):
            connections.close()
        assert looks[-1] - looks[0] > connecting._LOOK, "it has waited for the greeting"


def test_strangers_do_not_hold_ranks_up():
    """One says nothing, one too much, one a wrong word, and one leaves."""
    with closing(Door(2)) as door:
        strangers = [guest(door) for _ in range(4)]
        strangers[1].sendall(b"x" * 100_000)
        strangers[2].sendall(connecting._HELLO.pack(1, 0, bytes(16)))
        strangers[3].close()
        ours = [guest(door) for _ in connecting._PURPOSES]
        for purpose, connection in enumerate(ours):
            connection.sendall(greeting(door, purpose))
        began = time.monotonic()
        wires, streams = door.connect(0, [door.card, {}], 20.0, lambda: None)
        assert time.monotonic() - began < 10
        wires.send(1, [b"to rank 1"])
        assert ours[0].recv(9) == b"to rank 1"
        for one in (*strangers, *ours, wires, streams):
            one.close()


def test_the_oldest_of_many_strangers_are_dismissed(monkeypatch):
    with closing(Door(2)) as door:
        monkeypatch.setattr(connecting, "_MOST_GUESTS", 2)
        strangers = [guest(door) for _ in range(20)]

        def look():
            if len(door._guests) == 2 + 2 * 2:
                raise Unsupported("that is enough")

        with pytest.raises(Unsupported, match="enough"):
            door.connect(0, [door.card, {}], 20.0, look)
        for one in strangers:
            one.close()


def test_an_address_that_does_not_answer_does_not_take_all_the_time(monkeypatch):
    tried, looks, ends = [], [], socket.socketpair()

    def create_connection(address, timeout):
        tried.append((address[0], timeout))
        if address[0] == "silent" or len(tried) < 4:
            raise TimeoutError("timed out")
        return ends[0]

    monkeypatch.setattr(socket, "create_connection", create_connection)
    card = {"doors": [["silent", 1], ["slow", 2]], "word": bytes(16).hex()}
    until = time.monotonic() + 1000
    connecting._connected(1, 0, card, until, lambda: looks.append(0))
    assert len(ends[1].recv(100)) == connecting._HELLO.size
    for end in ends:
        end.close()
    assert [name for name, _ in tried] == ["silent", "slow", "silent", "slow"]
    assert max(timeout for _, timeout in tried) <= connecting._TRY
    assert len(looks) == 3, "it looks after its peers in between"


def test_addresses_that_refuse_are_not_tried_again(monkeypatch):
    def create_connection(address, timeout):
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(socket, "create_connection", create_connection)
    card = {"doors": [["one", 1], ["other", 2]], "word": bytes(16).hex()}
    with pytest.raises(Unsupported, match="one: refused, other: refused"):
        connecting._connected(1, 0, card, time.monotonic() + 1000, lambda: None)


def test_a_name_that_cannot_be_one_is_the_loopback(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "node..cluster")
    assert connecting._addresses() == ["127.0.0.1"]


class _Exhausted:
    """A listener of a process that may not open another file."""

    def __init__(self, listener):
        self._listener = listener

    def accept(self):
        raise OSError(errno.EMFILE, "Too many open files")

    def __getattr__(self, name):
        return getattr(self._listener, name)


def test_a_process_without_descriptors_says_so_at_once():
    with closing(Door(2)) as door, closing(guest(door)):
        door._listeners = [_Exhausted(one) for one in door._listeners]
        with pytest.raises(Unsupported, match="Too many open files"):
            door.connect(0, [door.card, {}], 1000.0, lambda: None)


def with_many_files() -> None:
    """The files of connections have large numbers."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    opened = [socket.socket() for _ in range(1100)]
    check_call(8, 3, 4)
    for one in opened:
        one.close()


def test_a_rank_with_a_thousand_open_files_connects(fresh_ranks):
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 1400:
        pytest.skip("a process may not open so many files here")
    fresh_ranks(2, WEFT_FABRIC="flat").run(with_many_files)


def one_cannot_connect() -> str:
    """Rank 1 finds at once that it has no way to rank 0, which waits for it."""
    usual = connecting._connected

    def refused(*arguments):
        raise Unsupported("has no way to rank 0")

    if dist.get_rank() == 1:
        connecting._connected = refused
    began = time.monotonic()
    with pytest.raises(Unsupported) as error:
        check_call(8, 3, 4)
    assert time.monotonic() - began < 8, "not after the deadline"
    connecting._connected = usual
    check_call(8, 3, 4)
    return str(error.value)


def test_all_ranks_hear_at_once_that_one_cannot_connect(fresh_ranks):
    said = fresh_ranks(3, WEFT_FABRIC="flat").run(one_cannot_connect)
    assert said == ["rank 1 has no way to rank 0"] * 3


def test_threads_that_connect_leave_nothing(fresh_ranks):
    """A refused opening ends with no more threads than it began with."""
    fresh_ranks(2, WEFT_FABRIC="flat").run(opened_with_a_bad_link)


def opened_with_a_bad_link() -> None:
    os.environ["WEFT_LINK"] = "nonsense"
    kept = []
    for _ in range(5):
        with pytest.raises(Unsupported, match="'nonsense' is not a link") as error:
            check_call(8, 3, 4)
        kept.append(error.value)
    assert [thread.name for thread in threading.enumerate() if "weft" in thread.name] == []
    del os.environ["WEFT_LINK"]
    check_call(8, 3, 4)
