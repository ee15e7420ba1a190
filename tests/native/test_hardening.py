"""What one rank can do to another through the memory they share: nothing that is not checked."""

from __future__ import annotations

import ctypes
import fcntl
import os
import stat
import struct
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from ranks import check_call

import weft
from weft import PeerLost, fabric
from weft.fabric import _native

F_ADD_SEALS = 1033
F_SEAL_FUTURE_WRITE = 0x10


def heap() -> str:
    """The descriptor of the group's memory, as a path that can be opened once more."""
    fabric.of()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # one of them was that of the list itself
            if "memfd:weft" in os.readlink(f"/proc/self/fd/{name}"):
                return f"/proc/self/fd/{name}"
    raise AssertionError("there is no heap")


def cut_off() -> None:
    """One rank tries to shorten the memory of all; it would be the end of every other."""
    check_call(8, 3, 4)
    before = os.stat(heap())
    if dist.get_rank() == 1:
        for size in (0, before.st_size - 4096, before.st_size + 4096):
            with pytest.raises(PermissionError):
                os.truncate(heap(), size)
        with open(heap(), "rb+") as file, pytest.raises(PermissionError):
            fcntl.fcntl(file, F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
    dist.barrier()
    assert os.stat(heap()).st_size == before.st_size
    assert stat.S_IMODE(before.st_mode) == 0o600
    check_call(8, 3, 4)


def test_no_rank_can_cut_off_the_memory_of_all(fresh_ranks):
    fresh_ranks(2).run(cut_off)


def test_a_descriptor_is_closed_when_its_memory_cannot_be_mapped():
    beyond = 2**50  # a file may be so large, an address space not
    for world, span in ((1, beyond), (2, 2**21)):
        fd = _native.create_heap(1, span)
        with pytest.raises(RuntimeError, match=r"cannot map|bytes, not"):
            _native.Fabric(fd, 0, world, span, 0, 0)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


HEADER = struct.Struct("<Q16QI")
"""The start of a header: its signature, where its buffers are, and how long its words are."""
HEADER_BYTES = HEADER.size + 4 + _native.MAX_BLOB


def header_of(call: int) -> ctypes.Array:
    """This rank's header of a call, in the memory of the group. It is found by its words."""
    native = fabric.of().native
    words = native.header(call, dist.get_rank())
    here = ctypes.addressof(ctypes.c_char.from_buffer(native.counters())) - 2 * HEADER_BYTES
    header = (ctypes.c_char * HEADER_BYTES).from_address(here + call % 2 * HEADER_BYTES)
    assert words in bytes(header)
    return header


def say_too_much() -> None:
    """A rank whose header says that its words go on beyond it, and its peers, which read it."""
    here = fabric.of()
    call = here.next_call()
    here.native.enter(call, 1, [0], b"words")
    if dist.get_rank() == 1:
        header = header_of(call)
        header[HEADER.size - 4 : HEADER.size] = struct.pack("<I", 2**31)
    dist.barrier()
    assert here.native.header(call, 0) == b"words"
    with pytest.raises(PeerLost, match="rank 1 has a header that does not fit its memory") as lost:
        here.native.header(call, 1)
    assert lost.value.rank == 1


def test_words_that_go_on_beyond_a_header_are_not_read(fresh_ranks):
    fresh_ranks(2).run(say_too_much)


def place_outside(offset: int) -> None:
    """A rank whose header places a buffer outside its memory, and a peer that should read there."""
    here = fabric.of()
    call = here.next_call()
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    here.native.enter(call, 1, [offset if rank == 1 else 0], b"")
    dist.barrier()
    if rank == 0:
        with pytest.raises(PeerLost, match="does not fit its memory"):
            here.native.peer_array(call, peer, 0, 4096)
        target = torch.zeros(4096, dtype=torch.uint8)
        program = _native.Program()
        program.add(peer, 0, False, (peer, 0, 0, 4096), (rank, 0, 0, 4096), 1, 4096, [], -1, [])
        flight = here.native.launch(
            program, call, here.deadline_ns(), [target.data_ptr()], [1, 1], False
        )
        with pytest.raises(PeerLost, match="rank 1 has a header or a message that does not fit"):
            here.wait(lambda: here.native.finish(flight), "test", "the copies")
    dist.barrier()


@pytest.mark.parametrize("offset", [2**21 - 4095, 2**21, 2**40, 2**64 - 4096])
def test_what_a_header_places_outside_its_memory_is_not_touched(fresh_ranks, offset):
    fresh_ranks(2, WEFT_HEAP="2MiB").run(place_outside, offset)


def refused_at_both_ends() -> None:
    here = fabric.of()
    for rank, slot in ((-1, 0), (2, 0), (0, -1), (0, _native.MAX_SLOTS)):
        with pytest.raises(IndexError):
            here.native.peer_pointer(1, rank, slot)
    block = here.native.allocate(10)
    source = torch.zeros(100, dtype=torch.uint8)
    with pytest.raises(ValueError, match="too small"):
        here.native.stage(block, source.data_ptr(), 100)
    with pytest.raises(weft.Unsupported, match="WEFT_HEAP"):
        here.memory.allocate(2**63)


def test_what_the_native_part_is_asked_for_is_checked_too(ranks):
    ranks(2).run(refused_at_both_ends)
