"""Sends few bytes together with the headers of a call, so that it takes one message, not three.

A rank that proposes the same call as the last time knows its plan. It appends the bytes for each
peer to its header, and the header names the plan. In a serial call that sends products, the header
waits for them. The bytes are used only if all headers name the plan that follows from the proposals
of this call. Every rank reads every header, so all ranks decide alike. If the bytes are not used,
transfers follow as usual.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence

import numpy as np
import torch

from weft.fabric.group.transfers import Payload, bytes_of
from weft.fabric.reach import Transfer
from weft.plan.tasks import Copy, Plan
from weft.timeline import COMPUTE

MOST_BYTES = 512 * 1024
"""The most bytes from one rank to another that go with a header. Up to this size, copying them out
of the message costs less than waiting for two more messages."""


def number_of(plan: Plan, nodes: Sequence[int], signatures: Sequence[int]) -> int:
    """The number of a plan whose bytes travel with headers. 0 if they do not: because they are too
    many, or because some are computed when the ranks have met."""
    sizes: dict[tuple[int, int], int] = {}
    made = _made_first(plan)
    for task in plan.tasks:
        if not isinstance(task, Copy) or nodes[task.source.rank] == nodes[task.rank]:
            continue
        ends = (task.source.rank, task.rank)
        given = plan.buffer[task.source.key].kind == "input"
        if not made.issuperset(task.after) or given == bool(task.after):
            return 0
        sizes[ends] = sizes.get(ends, 0) + plan.num_bytes(task.source)
    if not sizes or max(sizes.values()) > MOST_BYTES:
        return 0
    packed = struct.pack(f"<{len(signatures)}Q", *signatures)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") or 1


def _made_first(plan: Plan) -> set[int]:
    """The products of a serial plan that are complete before their rank waits for a peer."""
    made: set[int] = set()
    if plan.schedule.serial:
        for rank in range(plan.operation.world):
            for task in plan.lanes.get((rank, COMPUTE), ()):
                if not made.issuperset(task.after):
                    break
                made.add(task.id)
    return made


def pack(
    transfers: Sequence[Transfer], view: Callable[[Transfer], torch.Tensor]
) -> dict[int, list[Payload]]:
    """The bytes that go with the header to every peer, in the order of the plan."""
    parts: dict[int, list[Payload]] = {}
    for transfer in transfers:
        if transfer.sends:
            flat = np.ascontiguousarray(bytes_of(view(transfer)))
            parts.setdefault(transfer.peer, []).append(flat)
    return parts
