"""Independent work on a node of devices: who has which compute units under a strategy.

A collective that is driven by cores needs compute units, and so does the GEMM. Workgroups get them
in the order of launch, and keep them until they end:

    concurrent      the GEMM came first. Its tiles fill the units wave after wave, so that the
                    collective has none until the last wave leaves some over
    prioritized     the collective came first and keeps the units that saturate its links; the GEMM
                    has the others, and these too once the collective is over
    partitioned:K   masks confine the collective to K units and the GEMM to the others, from launch
                    to end, whoever is done
    both            the collective came first, confined to K units; the GEMM has the others, and
                    these too once the collective is over
    dma             the GEMM has all units
    dma+trimmed:K   the GEMM is confined to all units but K

Whoever moves the bytes, they go through memory that the GEMM uses too. Memory serves requests in
the order of arrival, so where both ask for more than there is, both are slowed alike. And where
arithmetic and bytes meet in fabric, caches and power, each slows the other (`links.interference`),
the more, the more memory traffic a byte makes on its way.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.machine import Machine
from weft.plan.concurrent import Concurrent
from weft.plan.tasks import AnyTask, Copy, Matmul, Plan
from weft.simulate.cost.collective import collective
from weft.simulate.cost.gemm import GemmCost, gemm
from weft.simulate.demand import Kernel, Transfer
from weft.simulate.events import Events
from weft.simulate.queues import Job, Lane
from weft.simulate.sharing import Flow, Sharing
from weft.strategy import Strategy

_Job = Job[Kernel | Transfer]


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
        self._sharing = Sharing(proportional=True)
        self._behind = strategy.base == "concurrent"
        # Whether the GEMM goes without some units from launch to end, used or not.
        masked = strategy.reserved > 0 and not strategy.prioritized
        self._confined = masked or strategy.trimmed > 0
        self._dtype = plan.operation.dtype
        self._silence = _silence_of(plan, machine, strategy)
        side = machine.engines if strategy.engine == "dma" else machine.cores
        self._interference = machine.links.interference * side.memory_bytes_per_byte
        self._full = machine.links.out_of_device(max(2, plan.operation.world))
        # By rank: whether a GEMM is ahead of the collective, copies that wait for units, what of
        # the GEMM's flow is its last wave with the workgroups that fit beside it, and the copies
        # whose bytes flow.
        self._ahead = {task.rank for task in tasks if isinstance(task, Matmul)}
        self._starved: dict[int, list[_Job]] = {}
        self._last: dict[int, tuple[float, int]] = {}
        self._flowing: dict[int, list[_Job]] = {}
        for rank in {task.rank for task in tasks}:
            if self._confined:
                bandwidth = self._node.memory_bandwidth(self._units(rank))
                self._sharing.set_capacity(self._node.memory(rank), bandwidth)
            if strategy.reserved:
                self._drive(rank, strategy.reserved)

    def _cost(self, task: AnyTask, lane: Lane, now: float) -> tuple[Kernel | Transfer, float]:
        cost, fixed = super()._cost(task, lane, now)
        return (cost, self._silence) if isinstance(task, Copy) else (cost, fixed)

    def _units(self, rank: int) -> int:
        strategy, taken = self._strategy, 0
        if self._confined:
            taken = strategy.trimmed or strategy.reserved
        elif self._held[rank] and not self._behind:
            taken = strategy.reserved or self._most_held
        return max(1, self._machine.compute.units - taken)

    def _cap(self, kernel: Kernel, rank: int) -> float:
        cap, job = super()._cap(kernel, rank), self._kernel_of[rank]
        copies = (copy.cost for copy in self._flowing.get(rank, ()))
        flowing = sum(cost.rate for cost in copies if isinstance(cost, Transfer))
        if flowing == 0.0 or not isinstance(job.task, Matmul):
            return cap
        cost = self._gemm(job.task, self._units(rank))
        slower = 1.0 + min(1.0, flowing / self._full) * self._interference
        before = max(cost.compute_seconds, cost.memory_seconds)
        return cap * before / max(slower * cost.compute_seconds, cost.memory_seconds)

    def _drive(self, rank: int, units: int) -> None:
        """The collective of a rank has so many units; fewer than it needs leave links hungry."""
        share = min(1.0, units / self._most_held)
        self._sharing.set_capacity(self._node.driven(rank), share * self._node.driven_bandwidth)

    def _body(self, job: _Job, now: float) -> None:
        rank = job.lane.rank
        waits = self._behind and rank in self._ahead
        if isinstance(job.cost, Kernel):
            super()._body(job, now)
            if waits and isinstance(job.task, Matmul) and job.flow is not None:
                share, free = _last_wave(self._machine, job.task, self._gemm(job.task))
                if free:
                    self._last[rank] = (share * job.flow.left, free)
                    job.flow.left *= 1.0 - share
        elif waits:
            self._starved.setdefault(rank, []).append(job)
        else:
            super()._body(job, now)
            self._flowing.setdefault(rank, []).append(job)
        self._meet(rank)

    def _end(self, job: _Job, now: float) -> None:
        super()._end(job, now)
        rank = job.lane.rank
        if isinstance(job.cost, Transfer):
            self._flowing[rank].remove(job)
        elif self._behind:
            self._feed(rank, self._most_held, now)
        self._meet(rank)

    def _flow_ended(self, flow: Flow, now: float) -> None:
        job: _Job = flow.owner
        rank = job.lane.rank
        if isinstance(job.cost, Transfer) or rank not in self._last:
            super()._flow_ended(flow, now)
            return
        # All waves but the last are over: it goes on, and the collective has what it leaves free.
        size, free = self._last.pop(rank)
        self._sharing.stop(flow)
        job.flow = Flow(job, size, flow.cap, flow.draws, now)
        self._sharing.start(job.flow)
        self._feed(rank, free, now)

    def _feed(self, rank: int, units: int, now: float) -> None:
        """Units have become free for the collective of a rank."""
        self._ahead.discard(rank)
        self._drive(rank, units)
        for job in self._starved.pop(rank, []):
            job.start = now  # until here it only waited
            self._body(job, now)

    def _meet(self, rank: int) -> None:
        """What runs on a rank has changed: GEMM and copies slow each other, or no longer do."""
        job = self._kernel_of.get(rank)
        busy = job is not None and job.flow is not None
        for copy in self._flowing.get(rank, ()):
            if copy.flow is not None and isinstance(copy.cost, Transfer):
                slower = 1.0 + self._interference if busy else 1.0
                self._sharing.set_cap(copy.flow, copy.cost.rate / slower)
        if job is not None and job.flow is not None and isinstance(job.cost, Kernel):
            self._sharing.set_cap(job.flow, self._cap(job.cost, rank))

    def _gemm(self, task: Matmul, units: int | None = None) -> GemmCost:
        c = task.c
        return gemm(self._machine, c.rows, c.columns, task.inner, self._dtype, units=units)


def _silence_of(plan: Plan, machine: Machine, strategy: Strategy) -> float:
    """Seconds of a collective in which no byte flows: a library that picks its protocol, or a host
    that commands one engine after the other. What its closed form has beyond the bytes."""
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
    )
    peers, links = world - 1, machine.links
    rate = min(machine.engines.bandwidth, links.to_one_peer(), links.out_of_device(world) / peers)
    if strategy.engine == "cores":
        best = max(protocol.bandwidth for protocol in machine.cores.protocols)
        reach = links.out_of_device(world) / links.out_of_device(links.world)
        rate = min(links.to_one_peer(), best * reach / peers)
    piece = max(operation.num_bytes(peer, 0) for peer in range(world))
    return max(0.0, seconds - piece / rate)


def _last_wave(machine: Machine, task: Matmul, cost: GemmCost) -> tuple[float, int]:
    """What share of a GEMM's time its last wave takes, and how many workgroups fit beside it.

    Tiles are handed out until the units are full, then one by one as others end. What the last
    wave does not fill is free for the kernel that was launched next.
    """
    tiling, units = machine.compute.tiling, machine.compute.units
    if tiling is None:
        return 1.0, 0
    rows, columns = cost.tile
    resident = next(t.resident for t in tiling.tiles if (t.rows, t.columns) == cost.tile)
    tiles = -(-task.c.rows // rows) * -(-task.c.columns // columns) * cost.split_k
    waves, rest = divmod(tiles, units * resident)
    if rest == 0:
        return 0.0, 0
    last = -(-rest // units) / resident
    return last / (waves + last), units * resident - rest
