"""Choices that need no estimate: one schedule is good whenever its condition holds.

All ranks apply these rules by themselves, so a rule uses only what is equal on all ranks.
"""

from __future__ import annotations

from typing import Any

from weft.fabric import Capabilities, Link
from weft.plan.embedding_all_to_all import EmbeddingAllToAll
from weft.plan.matmul_all_reduce import FEW_ROWS, MatmulAllReduce
from weft.plan.matmul_all_to_all import MatmulAllToAll
from weft.schedule import Schedule
from weft.select.heuristic import Choice

_SERIAL = Schedule.parse("serial")
_IN_KERNEL = Schedule.parse("in-kernel")
_ONE_PIECE = Schedule.parse("in-kernel:1")
_SLICED = Schedule.parse("hetero-unfused-1d:8")


MANY_ROWS = 256
"""From this many rows on, chunks of rows are large enough to hide what is sent."""
_COLUMNS = 64
"""The columns of an owner that a GEMM of their own needs."""


def fixed(can: Capabilities, operation: Any) -> Choice | None:
    """The schedule that an operation always has; None if it has none."""
    if not isinstance(operation, EmbeddingAllToAll):
        return None
    if operation.world == 1:
        return Choice(_SERIAL, "there is one rank")
    if not can.in_kernel:
        return Choice(_SLICED, "slices leave as they are looked up")
    return Choice(_IN_KERNEL, "pooled rows are stored where they are needed")


def fused(can: Capabilities, link: Link, operation: Any) -> Choice | None:
    """The in-kernel schedule of a product that is worth a try, for the guard to compare with
    serial; None if there is none. If a rule applies, results are placed where peers can store."""
    if operation.world == 1 or not can.in_kernel:
        return None
    if isinstance(operation, MatmulAllReduce):
        if FEW_ROWS < operation.m <= MANY_ROWS and operation.dtype == "float32":
            if link.paced or operation.n < _COLUMNS * operation.world:
                return None
            return Choice(
                _ONE_PIECE,
                f"{operation.m} rows: smaller chunks would each read w or x again",
            )
        if operation.m > FEW_ROWS or operation.dtype == "float64":
            return None
        return Choice(
            _IN_KERNEL,
            f"{operation.m} rows: the time goes into reading w, and blocks leave as they are made",
        )
    if isinstance(operation, MatmulAllToAll) and operation.in_kernel and not link.paced:
        return Choice(_ONE_PIECE, "links are as fast as memory: made where needed")
    return None
