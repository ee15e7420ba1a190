"""A fused product that this rank has made before, made once more with other operands.

Where few rows are multiplied again and again, as in decoding, what a rank does between two products
counts as much as what it multiplies. So what follows from sizes alone is kept from the first such
call: its header, its kernel, what the headers of its peers are expected to say. The rest is one
native call.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from weft.fabric import HostFabric, _native
from weft.fabric.outcomes import DISAGREE, OK
from weft.run import call as calls
from weft.run.executor import NOTHING
from weft.run.kernel import KernelRunner
from weft.run.proposal import Proposal


class Known(NamedTuple):
    """All of a call but its operands."""

    runner: KernelRunner
    native: _native.Repeat
    why: str
    inbox: int
    """Bytes of the workspace into which peers store their parts."""
    shape: tuple[int, ...]
    """Of the result."""
    rows: int
    x_pitch: int
    """Bytes from one row of x to the next."""


Place = tuple[int, int, bool, int, int]
"""Of a weight: where it is, its type, whether its columns lie together, the bytes from a row (or a
column) to the next, and how many rows it has."""

BUFFERS = ["x", "w", "y", "partial", "inbox"]
"""What the native part takes the buffers of a kernel to be, in this order."""
SLOTS = ["inbox", "y"]


def known_of(
    runner: object,
    proposal: Proposal,
    why: str,
    inbox: int,
    shape: tuple[int, ...],
    rows: int,
    x_pitch: int,
) -> Known | None:
    """What is kept of a call that has just been made; None where it was none of this kind."""
    if not isinstance(runner, KernelRunner) or runner.places != (BUFFERS, SLOTS):
        return None
    native = _native.Repeat(
        runner.kernel,
        runner.kernels,
        proposal.signature,
        proposal.blob,
        runner.signatures,
        runner.workspace_bytes,
    )
    return Known(runner, native, why or runner.why, inbox, shape, rows, x_pitch)


def repeat(
    fabric: HostFabric, known: Known, x: int, weight: Place, scale: int, y: int, landing: int
) -> bool:
    """Makes a known call once more: x, the scale and y are at these addresses, and landing is where
    peers find y.

    The caller holds the lock of the fabric. False if the ranks do not mean the call that they meant
    the last time: this rank has entered it then, and nothing has moved.
    """
    started = time.perf_counter()
    call = fabric.next_call()
    runner, native = known.runner, known.native
    try:
        inbox = fabric.shared_workspace("inbox", known.inbox)
        outcome = native.start(
            fabric.native,
            call,
            int(fabric.deadline * 1e9),
            x,
            known.rows,
            known.x_pitch,
            *weight,
            scale,
            y,
            inbox.pointer,
            inbox.offset,
            landing,
        )
        if outcome[0] != OK:
            outcome = fabric.wait(native.go, runner.label, "the blocks of its peers", outcome)
            if outcome[0] == DISAGREE:
                return False
    except BaseException as error:
        calls.break_off(fabric, call, error)
        raise
    ended = time.perf_counter()
    seconds = ended - started
    calls.last = calls.Finished(runner.plan, fabric.rank, known.why, seconds, NOTHING, ended)
    return True
