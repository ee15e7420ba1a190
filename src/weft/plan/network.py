"""Makes plans for ranks on several machines.

If machines have several ranks, data that these share crosses the network once (`two_level_*`). All
other plans are flat: they treat all peers equally. `adaptive` without a depth cuts otherwise than
inside a machine, because a chunk is a message that threads on both sides must handle. When rows are
gathered, it uses fewer chunks. When products are sent, chunks are whole rows, which need not be
copied to be sent, and each is larger than the one before (`blocks.growing_blocks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weft.errors import Unsupported
from weft.plan import scattering, two_level_gathering, two_level_scattering
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.plan.all_to_all_matmul import AllToAllMatmul
from weft.plan.builder import refuse_impossible
from weft.plan.gathering import default_depth
from weft.plan.matmul_all_to_all import MatmulAllToAll
from weft.plan.matmul_reduce_scatter import MatmulReduceScatter
from weft.plan.nodes import Nodes
from weft.plan.tasks import Plan, Plannable
from weft.schedule import Schedule

MOST_CHUNKS = 8
"""The most chunks per shard of `adaptive` without a depth. On a core that also computes, a call of
2048 x 1024 x 2048 took 191 ms of processor time with 32 chunks, 153 ms with 16, 130 ms with 8, and
134 ms with 4."""


def lower(operation: Plannable, schedule: Schedule, nodes: Sequence[int], levels: int = 2) -> Plan:
    """The plan of an operation whose rank r is on the machine nodes[r]. levels: 1 for flat plans
    only, 2 to allow two-level plans."""
    if schedule.fusion == "kernel":
        raise Unsupported(
            f"{schedule} cannot be run between machines: its kernel stores into the memory of "
            "peers, and a network has none to store into; use auto"
        )
    if schedule.engine == "direct":
        raise Unsupported(
            f"{schedule} cannot be run between machines: direct reads a peer's memory in place, "
            f"and a network has none to read; use {schedule.with_engine('dma')}"
        )
    free = schedule.fusion == "adaptive" and schedule.depth is None
    if free and isinstance(operation, AllGatherMatmul | AllToAllMatmul):
        schedule = replace(schedule, depth=min(MOST_CHUNKS, default_depth(operation, schedule)))
    placed = Nodes(tuple(nodes))
    if min(placed.levels, levels) == 2:
        refuse_impossible(schedule)
        # Subclasses (all-reduce is one of reduce-scatter) have flat plans.
        if type(operation) is AllGatherMatmul and two_level_gathering.possible(schedule):
            return two_level_gathering.lower(operation, schedule, placed)
        if type(operation) is MatmulReduceScatter and two_level_scattering.possible(
            operation, schedule
        ):
            return two_level_scattering.lower(operation, schedule, placed)
    if free and isinstance(operation, MatmulReduceScatter | MatmulAllToAll):
        experts = getattr(operation, "experts", ())
        if not operation.everywhere and not experts:
            return scattering.lower(operation, schedule, growing=True)
    return operation.lower(schedule)
