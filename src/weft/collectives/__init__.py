"""Collectives over shared memory: public functions, handles, and the torch.distributed backend.

Bytes move in chunks and without Python; sums are in the order of ranks. `native/channel.h` has the
protocol. Only `group_channel.py` reaches the native module.
"""

from weft.collectives import backend as _backend
from weft.collectives.exchanges import all_to_all, scatter
from weft.collectives.gathers import all_gather, broadcast, gather
from weft.collectives.handle import Handle
from weft.collectives.sums import all_reduce, reduce_scatter

_backend.register()

__all__ = [
    "Handle",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "gather",
    "reduce_scatter",
    "scatter",
]
