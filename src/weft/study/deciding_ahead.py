"""What it costs to decide `adaptive` ahead, as streams must: planned against decided by arrivals.

Both are simulated on the same machine. `adaptive` looks which chunks have arrived whenever compute
is free. Planned, the chunks of each GEMM are fixed beforehand (`weft.plan.planned`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.machine import Machine
from weft.plan.planned import GPU_TILE, Rates, planned
from weft.schedule import Schedule
from weft.simulate import run
from weft.simulate.cost.gemm import gemm
from weft.study.exploration import Exploration

ADAPTIVE = Schedule.parse("adaptive@dma")
_SIDE = 4096


@dataclass(frozen=True)
class Ahead:
    """One shape: the seconds of `adaptive@dma` as decided by arrivals, and planned."""

    label: str
    decided: float
    planned: float

    @property
    def loss_percent(self) -> float:
        return 100 * (self.planned / self.decided - 1)


def deciding_ahead(found: Exploration) -> list[Ahead]:
    """Every shape of an exploration, planned."""
    made = []
    for scenario in found.scenarios:
        plan = scenario.operation.lower(ADAPTIVE)
        rates = rates_of(found.machine, scenario.operation.world, scenario.operation.dtype)
        fixed = run(planned(plan, rates), found.machine).seconds
        made.append(Ahead(scenario.shape.label, run(plan, found.machine).seconds, fixed))
    return made


def mean_loss(some: Sequence[Ahead]) -> float:
    """The mean loss over shapes, in percent."""
    return sum(one.loss_percent for one in some) / max(1, len(some))


def rates_of(machine: Machine, world: int, dtype: str) -> Rates:
    """What a plan is decided by on a machine: its rates with all links in use."""
    links, launch = machine.links, machine.launch
    seconds = gemm(machine, _SIDE, _SIDE, _SIDE, dtype).seconds
    return Rates(
        link=min(machine.engines.bandwidth, links.out_of_device(world) / max(1, world - 1)),
        flops=2 * _SIDE**3 / seconds,
        memory=machine.memory.bandwidth,
        latency=machine.engines.packet + links.latency,
        launch=launch.kernel + launch.gap,
        units=machine.compute.units,
        tile=GPU_TILE,
    )
