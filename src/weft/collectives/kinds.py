"""The numbers by which kinds of collectives, dtypes and reductions go to the native channel."""

from __future__ import annotations

from weft.dtype import channel_numbers
from weft.errors import Unsupported, nearest
from weft.plan.collective import KINDS

ALL_GATHER = KINDS["all_gather"].number
ALL_TO_ALL = KINDS["all_to_all"].number
REDUCE_SCATTER = KINDS["reduce_scatter"].number
ALL_REDUCE = KINDS["all_reduce"].number
BROADCAST = KINDS["broadcast"].number
GATHER = KINDS["gather"].number
SCATTER = KINDS["scatter"].number
REDUCE = KINDS["reduce"].number
BARRIER = KINDS["barrier"].number

BY_NUMBER = {kind.number: kind for kind in KINDS.values()}

DTYPES = channel_numbers()
"""By torch dtype."""
OTHER = len(DTYPES)
"""Any other dtype: the channel can move it, but not add it."""

REDUCTIONS = ("sum", "product", "min", "max", "band", "bor", "bxor", "avg")
"""In the order of `native/sums.h`."""
SUM = 0


def reduction(op: str) -> int:
    """The number of a reduction."""
    if op not in REDUCTIONS:
        raise Unsupported(
            f"there is no reduction {op!r}{nearest(str(op), REDUCTIONS)}; "
            f"there are {', '.join(REDUCTIONS)}"
        )
    return REDUCTIONS.index(op)
