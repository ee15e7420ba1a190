"""How plans are made where some ranks are on other machines.

Where machines have several ranks, what they share crosses the network once (`two_level_*`); other
plans are flat, and treat all peers alike. Where rows are gathered, `adaptive` without a depth cuts
less finely than inside a machine, because a chunk is a message that threads of both sides handle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weft.errors import Unsupported
from weft.plan import two_level_gathering, two_level_scattering
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.plan.all_to_all_matmul import AllToAllMatmul
from weft.plan.builder import refuse_impossible
from weft.plan.gathering import default_depth
from weft.plan.matmul_reduce_scatter import MatmulReduceScatter
from weft.plan.nodes import Nodes
from weft.plan.tasks import Plan, Plannable
from weft.schedule import Schedule

MOST_CHUNKS = 8
"""Into so many chunks `adaptive` without a depth cuts a shard at most. On one core that computes as
well, a call of 2048 x 1024 x 2048 took 191 ms of processor time with 32 chunks, 153 with 16, 130
with 8 and 134 with 4."""


def lower(operation: Plannable, schedule: Schedule, nodes: Sequence[int], levels: int = 2) -> Plan:
    """The plan of an operation whose rank r is on the machine nodes[r], on up to so many levels."""
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
    open_depth = schedule.fusion == "adaptive" and schedule.depth is None
    if open_depth and isinstance(operation, AllGatherMatmul | AllToAllMatmul):
        schedule = replace(schedule, depth=min(MOST_CHUNKS, default_depth(operation, schedule)))
    placed = Nodes(tuple(nodes))
    if min(placed.levels, levels) == 2:
        refuse_impossible(schedule)
        # Operations that only look like these (all-reduce is one that sums) have flat plans.
        if type(operation) is AllGatherMatmul and two_level_gathering.possible(schedule):
            return two_level_gathering.lower(operation, schedule, placed)
        if type(operation) is MatmulReduceScatter and two_level_scattering.possible(
            operation, schedule
        ):
            return two_level_scattering.lower(operation, schedule, placed)
    return operation.lower(schedule)
