"""Independent work on a node of devices: which compute units the GEMM and the collective have under
a strategy.

A collective that is driven by cores needs compute units, and so does the GEMM. Workgroups get units
in the order of launch, and keep them until they end:

    concurrent      The GEMM is launched first. Its tiles have all units until the last tile has
                    started. Then units become free as tiles end, and the collective gets them.
    prioritized     The collective is launched first and keeps as many units as saturate its links.
                    The GEMM has the other units, and these too once the collective has ended.
    partitioned:K   Masks confine the collective to K units and the GEMM to the others, until both
                    have ended.
    both            The collective is launched first, confined to K units. The GEMM has the other
                    units, and these too once the collective has ended.
    dma             The GEMM has all units.
    dma+trimmed:K   The GEMM is confined to all units but K.

Everything else is as for any plan (`events`): how much a GEMM and a transfer slow each other does
not depend on whether one needs the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.machine import Machine
from weft.plan.concurrent import Concurrent
from weft.plan.tasks import AnyTask, Copy, Matmul, Plan
from weft.simulate.cost.collective_cost import bandwidth_by_cores, collective
from weft.simulate.cost.gemm import SPREAD, GemmCost, gemm
from weft.simulate.demand import KernelDemand, TransferDemand
from weft.simulate.events import Events
from weft.simulate.queues import Job, Lane
from weft.simulate.sharing import Flow
from weft.strategy import Strategy

_Job = Job[KernelDemand | TransferDemand]


class BesideEvents(Events):
    """One simulation of a plan whose schedule is a `Strategy`."""

    def __init__(
        self,
        plan: Plan,
        machine: Machine,
        tasks: Sequence[AnyTask],
        after: Sequence[Sequence[int]],
        folded: bool,
    ) -> None:
        super().__init__(plan, machine, tasks, after, folded)
        assert isinstance(plan.schedule, Strategy)
        self._strategy = strategy = plan.schedule
        self._behind = strategy.base == "concurrent"
        # Whether some units are closed to the GEMM from launch to end, used or not.
        masked = strategy.reserved > 0 and not strategy.prioritized
        self._confined = masked or strategy.trimmed > 0
        self._dtype = plan.operation.dtype
        self._silence = _silence_of(plan, machine, strategy)
        # By rank: whether a GEMM is ahead of the collective, the copies that wait for units, and
        # how much of the GEMM's flow is left when units become free for them.
        self._ahead = {task.rank for task in tasks if isinstance(task, Matmul)}
        self._starved: dict[int, list[_Job]] = {}
        self._left_over: dict[int, float] = {}
        for rank in {task.rank for task in tasks}:
            if self._confined:
                bandwidth = self._node.memory_bandwidth(self._units(rank))
                self._sharing.set_capacity(self._node.memory(rank), bandwidth)
            if plan.operation.world > 1:
                driven = _driven(plan, machine, strategy)
                self._driving[rank] = driven / self._node.driven_bandwidth
                self._drive(rank)

    def _cost(
        self, task: AnyTask, lane: Lane, now: float
    ) -> tuple[KernelDemand | TransferDemand, float]:
        cost, fixed = super()._cost(task, lane, now)
        if not isinstance(task, Copy):
            return cost, fixed
        # Behind a GEMM, the time in which no byte flows begins when the collective has units.
        return cost, 0.0 if self._waits(lane.rank) else self._silence

    def _waits(self, rank: int) -> bool:
        return self._behind and rank in self._ahead

    def _units(self, rank: int) -> int:
        strategy, taken = self._strategy, 0
        if self._confined:
            taken = strategy.trimmed or strategy.reserved
        elif self._held[rank] and not self._behind:
            taken = strategy.reserved or self._most_held
        return max(1, self._machine.compute.units - taken)

    def _body(self, job: _Job, now: float) -> None:
        rank = job.lane.rank
        if isinstance(job.cost, TransferDemand) and self._waits(rank):
            self._starved.setdefault(rank, []).append(job)
            return
        super()._body(job, now)
        if self._waits(rank) and isinstance(job.task, Matmul) and job.flow is not None:
            cost = gemm(
                self._machine, job.task.c.rows, job.task.c.columns, job.task.inner, self._dtype
            )
            share = _busy_share(self._machine, job.task, cost, self._most_held)
            self._left_over[rank] = (1.0 - share) * job.flow.left
            job.flow.left *= share

    def _end(self, job: _Job, now: float) -> None:
        super()._end(job, now)
        if not isinstance(job.cost, TransferDemand) and self._behind:
            self._feed(job.lane.rank, now)

    def _flow_ended(self, flow: Flow, now: float) -> None:
        job: _Job = flow.owner
        rank = job.lane.rank
        if isinstance(job.cost, TransferDemand) or rank not in self._left_over:
            super()._flow_ended(flow, now)
            return
        # The GEMM continues with the tiles that have started; the collective has the other units.
        size = self._left_over.pop(rank)
        self._sharing.stop(flow)
        job.flow = Flow(job, size, flow.cap, flow.draws, now)
        self._sharing.start(job.flow)
        self._feed(rank, now)

    def _slows_bytes(self, rank: int) -> float:
        # Behind a GEMM, bytes flow while its last tiles end. On average half of them are left.
        return (
            self._contention.slows_bytes(0.5) if self._fading(rank) else super()._slows_bytes(rank)
        )

    def _fading(self, rank: int) -> bool:
        return self._behind and rank in self._kernel_of and rank not in self._ahead

    def _feed(self, rank: int, now: float) -> None:
        """Units have become free for the collective of a rank."""
        self._ahead.discard(rank)
        self._met[rank] = None
        for job in self._starved.pop(rank, []):
            job.start = now  # until now it only waited
            self._begin_body(job, now + self._silence)


def _silence_of(plan: Plan, machine: Machine, strategy: Strategy) -> float:
    """The seconds of a collective in which no byte flows, because a library picks its protocol or a
    host commands one engine after another: the time of its closed form without the bytes."""
    operation, world = plan.operation, plan.operation.world
    assert isinstance(operation, Concurrent)
    if world == 1 or operation.total_bytes == 0:
        return 0.0
    variant = "pcpy" if strategy.engine == "dma" else None
    seconds = collective(
        machine,
        operation.collective,
        operation.total_bytes,
        world,
        driver=strategy.engine,
        variant=variant,
        units=strategy.reserved or None,
    )
    peers, links = world - 1, machine.links
    if strategy.engine == "cores":
        rate = _driven(plan, machine, strategy) / peers
    else:
        rate = min(machine.engines.bandwidth, links.out_of_device(world) / peers)
    rate = min(rate, links.to_one_peer())
    piece = max(operation.num_bytes(peer, 0) for peer in range(world))
    return max(0.0, seconds - piece / rate)


def _driven(plan: Plan, machine: Machine, strategy: Strategy) -> float:
    """The bytes per second that leave a device in the collective, with the units that it has."""
    operation = plan.operation
    assert isinstance(operation, Concurrent)
    reserved = strategy.reserved or None
    return bandwidth_by_cores(machine, operation.collective, operation.world, reserved)


def _busy_share(machine: Machine, task: Matmul, cost: GemmCost, needed: int) -> float:
    """The share of a GEMM's time after which `needed` units are free for the next launch.

    Tiles fill the units. Each further tile takes the place of one that has ended, and the ends are
    spread evenly over the time of a tile. So the last tile starts one tile's time before the end of
    the GEMM, and from then on places become free one by one. A collective that fills them as they
    become free moves as much in that time as one that gets all of them halfway.
    """
    tiling, units = machine.compute.tiling, machine.compute.units
    if tiling is None:
        return 1.0
    rows, columns = cost.tile
    resident = next(t.resident for t in tiling.tiles if (t.rows, t.columns) == cost.tile)
    tiles = -(-task.c.rows // rows) * -(-task.c.columns // columns) * cost.split_k
    room = units * resident
    whole, rest = divmod(tiles, room)
    last = -(-rest // units) / resident
    if whole:
        last -= SPREAD * max(0.0, last - rest / room)
    waves = whole + last  # for as long as they are assumed to last
    halfway = 0.5 * min(needed, units) / units
    return min(1.0, max(0.0, tiles / room - 1.0 + halfway) / waves)
