"""The numbers by which collectives, dtypes and reductions go to the native channel."""

from __future__ import annotations

import torch

from weft.errors import Unsupported, nearest

KINDS = (
    "all_gather",
    "all_to_all",
    "reduce_scatter",
    "all_reduce",
    "broadcast",
    "gather",
    "scatter",
    "reduce",
    "barrier",
)
(
    ALL_GATHER,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    ALL_REDUCE,
    BROADCAST,
    GATHER,
    SCATTER,
    REDUCE,
    BARRIER,
) = range(len(KINDS))

DTYPES: dict[torch.dtype, int] = {
    torch.float64: 0,
    torch.float32: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.int8: 4,
    torch.uint8: 5,
    torch.int16: 6,
    torch.int32: 7,
    torch.int64: 8,
    torch.bool: 9,
}
OTHER = len(DTYPES)
"""Any other dtype: it can be moved, but not added."""

REDUCTIONS = ("sum", "product", "min", "max", "band", "bor", "bxor", "avg")
SUM = 0


def reduction(op: str) -> int:
    """The number of a reduction."""
    if op not in REDUCTIONS:
        raise Unsupported(
            f"there is no reduction {op!r}{nearest(str(op), REDUCTIONS)}; "
            f"there are {', '.join(REDUCTIONS)}"
        )
    return REDUCTIONS.index(op)
