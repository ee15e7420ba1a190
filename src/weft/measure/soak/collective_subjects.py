"""The collectives that soak calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from weft import collectives
from weft.measure.soak.subjects import Draw, Subject, register


def _collective(name: str, call: Callable[..., Any], expected: Callable[..., Any]) -> None:
    """schedules: the engine, and whether the call is in the background."""

    def run(d: Draw, rank: int, group: dist.ProcessGroup | None, way: str) -> torch.Tensor:
        engine, _, background = way.partition(" ")
        made = call(d, rank, group, engine, bool(background))
        return made.wait() if background else made  # type: ignore[no-any-return]

    ways = ("dma", "cores", "dma background", "cores background")
    register(Subject(name, run, expected, schedules=lambda world: ways, collective=True))


_collective(
    "all_gather",
    lambda d, r, group, engine, later: collectives.all_gather(
        d.there(d.x(r)), group=group, engine=engine, async_op=later
    ),
    lambda d, r: torch.cat([d.x(source).double() for source in range(d.world)]),
)
_collective(
    "all_reduce",
    lambda d, r, group, engine, later: collectives.all_reduce(
        d.there(d.x(r)), group=group, engine=engine, async_op=later
    ),
    lambda d, r: torch.stack([d.x(source).double() for source in range(d.world)]).sum(0),
)
_collective(
    "all_to_all",
    lambda d, r, group, engine, later: collectives.all_to_all(
        d.there(d.routed(r)),
        d.splits[r],
        d.received(r),
        group=group,
        engine=engine,
        async_op=later,
    ),
    lambda d, r: d.exchanged(r, d.routed),
)
_collective(
    "broadcast",
    lambda d, r, group, engine, later: collectives.broadcast(
        d.there(d.x(r)), d.root, group=group, engine=engine, async_op=later
    ),
    lambda d, r: d.x(d.root).double(),
)
