"""Few bytes travel with the headers of a call, so that it takes one message and not three.

A rank that knows the plan of a call, for it means what it meant the last time, puts what each peer
is to get behind its header. Headers say which plan that was made for; only if all of them say
the same, and it is the plan that follows from what the ranks mean now, are the bytes used. As every
rank reads every header, all come to the same answer; if it is no, transfers follow as usual.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence

import torch

from weft.fabric.group.transfers import Payload, bytes_of, view_of
from weft.fabric.reach import Transfer
from weft.plan.tasks import Copy, Plan

MOST_BYTES = 256 * 1024
"""Up to so many bytes from one rank to another go with a header: what is copied into a message and
out of it costs less, so far, than waiting for two more messages."""


def number_of(plan: Plan, nodes: Sequence[int], signatures: Sequence[int]) -> int:
    """The number by which ranks know a plan whose bytes travel with headers; 0 where they do not:
    there are too many, or some are made in the call."""
    sizes: dict[tuple[int, int], int] = {}
    tasks = plan.tasks
    for task in tasks:
        if not isinstance(task, Copy) or nodes[task.source.rank] == nodes[task.rank]:
            continue
        ends = (task.source.rank, task.rank)
        if task.after or plan.buffer[task.source.key].kind != "input":
            return 0
        sizes[ends] = sizes.get(ends, 0) + plan.num_bytes(task.source)
    if not sizes or max(sizes.values()) > MOST_BYTES:
        return 0
    said = struct.pack(f"<{len(signatures)}Q", *signatures)
    return int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "little") or 1


def pack(
    transfers: Sequence[Transfer], inputs: Mapping[str, torch.Tensor]
) -> dict[int, list[Payload]]:
    """What goes with the header to every peer, in the order of the plan."""
    parts: dict[int, list[Payload]] = {}
    for transfer in transfers:
        if transfer.sends:
            view = view_of(inputs[transfer.region.buffer], transfer.region)
            parts.setdefault(transfer.peer, []).append(bytes_of(view))
    return parts
