"""Collectives on shared memory: the public functions, their handles, the torch.distributed backend.

Moved in chunks without Python and summed in the order of ranks; `native/channel.h` says how.
"""

from weft.collectives import backend as _backend
from weft.collectives.exchanging import all_to_all, scatter
from weft.collectives.gathering import all_gather, broadcast, gather
from weft.collectives.handle import Handle
from weft.collectives.summing import all_reduce, reduce_scatter

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
