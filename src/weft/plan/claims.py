"""Plans whose compute is one persistent kernel that takes tiles of whatever has arrived.

The chunks and copies are those of `adaptive`. Its matmuls become the parts of one launch: workers
of the kernel claim tiles of a chunk as soon as an engine has moved it. A tile sums its whole K by
itself, so the result is equal to the last bit whatever comes first.
"""

from __future__ import annotations

from dataclasses import replace

from weft.errors import Unsupported
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.plan.gathering import adaptive_depth
from weft.plan.tasks import Plan, Plannable
from weft.schedule import Schedule

TILE_ROWS = 128
"""The rows of a tile on a GPU. By default chunks are not smaller, unless there would be fewer of
them than ranks."""


def lower(operation: Plannable, schedule: Schedule) -> Plan:
    """The plan of `in-kernel` on a device; raises `Unsupported` with the reason if it has none."""
    if not isinstance(operation, AllGatherMatmul):
        raise Unsupported(
            f"{schedule} needs a kernel that stores into the memory of peers, and on a device "
            f"{operation.name} has none; use adaptive, or the kernels of weft.triton"
        )
    if schedule.engine == "cores":
        raise Unsupported(
            f"{schedule} would copy with the cores that its kernel waits on; use in-kernel@dma"
        )
    depth = schedule.depth or adaptive_depth(operation.world, max(operation.rows) * 16 // TILE_ROWS)
    plan = operation.lower(Schedule(depth, fusion="adaptive"))
    return replace(plan, schedule=replace(schedule, engine="dma"), one_launch=True)
