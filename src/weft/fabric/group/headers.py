"""Headers as messages: what a rank sends to every other rank when it enters a call."""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from weft.fabric import _native
from weft.fabric.group.eager import MOST_BYTES
from weft.fabric.group.transfers import Payload

BYE = 0
"""Sent in place of the number of a call by a rank that leaves."""

_HEAD = struct.Struct("<QQQII")
HEAD_BYTES = _HEAD.size
HEADER_BYTES = HEAD_BYTES + _native.MAX_BLOB + MOST_BYTES
"""The most that a header takes."""

NOTHING: Payload = np.empty(0, np.uint8)


class Header(NamedTuple):
    """The header of a call, and the bytes that came with it for the plan `eager`."""

    signature: int
    blob: bytes
    eager: int
    payload: Payload


def write_header(call: int, signature: int, blob: bytes, eager: int = 0, payload: int = 0) -> bytes:
    """The message of a header, without its last `payload` bytes, which are for the plan `eager`."""
    return _HEAD.pack(call, signature, eager, len(blob), payload) + blob


def size_of(head: Payload) -> int | None:
    """The bytes of a message that begins with `head`; None if no header is that large."""
    *_, blob, payload = _HEAD.unpack_from(head.data)
    return HEAD_BYTES + blob + payload if _fits(blob, payload) else None


def read_header(raw: Payload) -> tuple[int, Header] | None:
    """The call and the header in a message; None if its sizes do not fit the message."""
    if len(raw) < HEAD_BYTES:
        return None
    call, signature, eager, size, payload = _HEAD.unpack_from(raw.data)
    begin = HEAD_BYTES + size
    if not _fits(size, payload) or begin + payload != len(raw):
        return None
    return call, Header(signature, raw[HEAD_BYTES:begin].tobytes(), eager, raw[begin:])


def _fits(blob: int, payload: int) -> bool:
    return blob <= _native.MAX_BLOB and payload <= MOST_BYTES
