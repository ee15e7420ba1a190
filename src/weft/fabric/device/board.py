"""The headers of calls on a device, in host memory that all ranks of a machine share.

Every rank has a board with room for the headers of its last calls. It posts a header and goes on;
whoever needs the headers of peers reads their boards. So a known call does not wait on the host,
and a call is still compared on all ranks, by the watchdog if need be.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from weft.fabric import _native
from weft.fabric.interface import Exposed
from weft.fabric.processes import ProcessFabric
from weft.fabric.proposal import Proposal

ROOM = 64
"""The headers that a board has room for: how many calls a rank may be ahead of its peers."""

_SEEN, _FAILED, _ENDED = 0, 1, 2
_NUMBER, _SIGNATURE, _SIZE, _KNOWN = range(4)
_WORDS = 4
_BLOB = _native.MAX_BLOB
_SLOT = _WORDS * 8 + _BLOB
_FIRST = 64
_BYTES = _FIRST + ROOM * _SLOT


class BoardHeader(NamedTuple):
    """What a rank has posted for a call. known: it has enqueued a known program at once, instead of
    waiting for the headers of all ranks."""

    signature: int
    known: bool
    blob: bytes

    def proposal(self) -> Proposal:
        return Proposal.read(self.blob)


class Board:
    """The boards of all ranks. Only the own one is written."""

    def __init__(self, host: ProcessFabric) -> None:
        self._memory = host.memory.empty((_BYTES,), torch.uint8)
        self._memory.zero_()
        self.rank, self.world = host.rank, host.world
        with host.call(
            Proposal("the first call on a device").checked(), Exposed({"board": self._memory})
        ) as call:
            call.proposals()
            addresses = [self._memory.data_ptr()] if self.world == 1 else call.addresses(0)
        self._bytes = [_array(address, _BYTES) for address in addresses]
        self._state = [memory[:_FIRST].view(np.int64) for memory in self._bytes]
        self._slots = [
            [memory[_FIRST + i * _SLOT :][:_SLOT] for i in range(ROOM)] for memory in self._bytes
        ]
        self._heads = [[slot[: _WORDS * 8].view(np.int64) for slot in own] for own in self._slots]

    def post(self, call: int, proposal: Proposal, known: bool) -> None:
        """Posts this rank's header of a call. The number is written last: it makes the rest
        valid."""
        slot, head = self._slots[self.rank][call % ROOM], self._heads[self.rank][call % ROOM]
        blob = proposal.blob
        head[_SIGNATURE] = _signed(proposal.signature)
        head[_SIZE] = len(blob)
        head[_KNOWN] = known
        slot[_WORDS * 8 : _WORDS * 8 + len(blob)] = np.frombuffer(blob, np.uint8)
        head[_NUMBER] = call

    def signature(self, call: int, rank: int) -> int | None:
        """The signature that a rank has posted for a call; None if it has not posted yet."""
        head = self._heads[rank][call % ROOM]
        return int(head[_SIGNATURE]) % 2**64 if head[_NUMBER] == call else None

    def header(self, call: int, rank: int) -> BoardHeader | None:
        """The header that a rank has posted for a call; None if it has not posted yet."""
        found = self.signature(call, rank)
        if found is None:
            return None
        head, slot = self._heads[rank][call % ROOM], self._slots[rank][call % ROOM]
        size = min(int(head[_SIZE]), _BLOB)
        blob = slot[_WORDS * 8 : _WORDS * 8 + size].tobytes()
        return BoardHeader(found, bool(head[_KNOWN]), blob)

    def missing(self, call: int) -> list[int]:
        """The ranks that have not posted a header for a call."""
        return [r for r in range(self.world) if self._heads[r][call % ROOM][_NUMBER] != call]

    def headers(self, call: int) -> list[BoardHeader]:
        """The headers of all ranks, which must have been posted."""
        found = [self.header(call, rank) for rank in range(self.world)]
        return [header for header in found if header is not None]

    def has_room(self, call: int) -> bool:
        """Whether every rank has compared the call whose headers this one overwrites."""
        return all(int(state[_SEEN]) >= call - ROOM for state in self._state)

    def seen(self, call: int) -> None:
        """This rank has compared the headers of all calls up to this one."""
        self._state[self.rank][_SEEN] = call

    def end(self, call: int) -> None:
        """All calls of this rank up to this one have ended on its device."""
        self._state[self.rank][_ENDED] = call

    def ended(self, rank: int) -> int:
        """The last call that has ended on the device of a rank."""
        return int(self._state[rank][_ENDED])

    def fail(self, call: int) -> None:
        """This rank has given up the group in a call."""
        self._state[self.rank][_FAILED] = call

    def failed(self) -> tuple[int, int] | None:
        """The first rank that has given up, and its call."""
        for rank, state in enumerate(self._state):
            if rank != self.rank and state[_FAILED]:
                return rank, int(state[_FAILED])
        return None


def differing(headers: Sequence[BoardHeader], signatures: Sequence[int]) -> bool:
    """Whether headers are others than expected."""
    return any(h.signature != s for h, s in zip(headers, signatures, strict=True))


def _array(address: int, size: int) -> npt.NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
