"""Headers as messages: what a rank sends to every other rank when it enters a call."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from weft.fabric import _native
from weft.fabric.group.eager import MOST_BYTES
from weft.fabric.group.transfers import Payload

HEADER_TAG = 0
BYE = 0
"""Sent in place of the number of a call by a rank that leaves."""

_HEAD = struct.Struct("<QQQI")
HEADER_BYTES = _HEAD.size + _native.MAX_BLOB + MOST_BYTES
"""The most that a header takes."""

NOTHING: Payload = np.empty(0, np.uint8)


class Header(NamedTuple):
    """The header of a call, and the bytes that came with it for the plan `eager`."""

    signature: int
    blob: bytes
    eager: int
    payload: Payload


def write_header(
    call: int, signature: int, blob: bytes, eager: int, payloads: Sequence[Payload]
) -> torch.Tensor:
    """The message of a header. eager: the number of the plan that payloads were made for."""
    head = np.frombuffer(_HEAD.pack(call, signature, eager, len(blob)) + blob, np.uint8)
    return torch.from_numpy(np.concatenate([head, *(part.reshape(-1) for part in payloads)]))


def read_header(raw: Payload) -> tuple[int, Header] | None:
    """The call and the header in a message; None if its sizes do not fit the message."""
    if len(raw) < _HEAD.size:
        return None
    call, signature, eager, size = _HEAD.unpack_from(raw.data)
    begin = _HEAD.size + size
    if size > _native.MAX_BLOB or begin > len(raw):
        return None
    return call, Header(signature, raw[_HEAD.size : begin].tobytes(), eager, raw[begin:])
