"""Runs a plan on a node of devices: a fluid event simulation of all ranks over shared resources.

`queues` decides when a task starts. It has a fixed part (a command, a launch, a decision) and then
a body that flows. Copies use the links, engines and memory of both ends. Kernels use compute units,
memory and, if they read operands in place, links. Whenever a body starts or ends, the resources are
distributed again.

- Engine commands are queued in advance. A command whose lane is still busy follows after the gap of
  a packet; a command whose lane is idle must be released first.
- The host launches one kernel after another, so a kernel may have to wait for its launch. In a
  captured graph (`Machine.captured`) it never does.
- A copy driven by cores takes compute units from the kernel beside it, from its launch to its end.
- Memory serves requests in the order of arrival. If the demand exceeds its bandwidth, all requests
  are slowed by the same factor.
- Kernels and transfers beside them slow each other as in `contention`.
- A task on another lane knows an end only after its signal, so there are gaps between spans.
- If a rank's compute lane is one kernel, only its first task is launched. The others follow when
  its workers reach them.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.machine import Machine
from weft.plan.tasks import AnyTask, Copy, Plan, Region
from weft.simulate.contention import contention
from weft.simulate.demand import Demands, KernelDemand, TransferDemand
from weft.simulate.node import Node
from weft.simulate.queues import Job, Lane, Queues
from weft.simulate.sharing import Flow

_Cost = KernelDemand | TransferDemand


class Events(Queues[_Cost]):
    """One simulation. `tasks`: those of all ranks, or of rank 0 if it represents all ranks."""

    def __init__(
        self,
        plan: Plan,
        machine: Machine,
        tasks: Sequence[AnyTask],
        after: Sequence[Sequence[int]],
        folded: bool,
    ) -> None:
        super().__init__(plan, tasks, after, machine.launch.decision)
        world = plan.operation.world
        self._machine = machine
        self._one_launch = plan.one_launch
        self._node = Node(machine, world, folded)
        self._demands = Demands(plan, self._node)
        self._kernel_of: dict[int, Job[_Cost]] = {}
        self._held = [0] * world
        self._most_held = _most_units(plan, machine)
        self._launches = [0] * world
        # By rank: the copies that it has commanded and whose bytes flow over links, the bytes per
        # second that leave it (the same number enters it), and the share of its core-driven
        # bandwidth that has units.
        self._contention = contention(machine, plan.schedule.engine, world)
        self._copies: list[dict[Job[_Cost], None]] = [{} for _ in range(world)]
        self._flowing = [0.0] * world
        self._driving = [1.0] * world
        # The ranks where a kernel has started or ended at this moment, and those where the load
        # beside a kernel has changed. Many copies start and end at once.
        self._met: dict[int, None] = {}
        self._crowd: dict[int, None] = {}

    def _cost(self, task: AnyTask, lane: Lane, now: float) -> tuple[_Cost, float]:
        if isinstance(task, Copy):
            transfer = self._demands.transfer(task)
            return transfer, transfer.next if lane.ended == now else transfer.first
        kernel = self._demands.kernel(task)
        if self._one_launch and lane.ended >= 0.0:
            return kernel, 0.0
        # The device gets its first kernel at time 0, and each further one a host call later.
        launch = self._machine.launch
        called = self._launches[lane.rank] * launch.host
        self._launches[lane.rank] += 1
        gap = launch.gap if lane.ended >= 0.0 else 0.0
        return kernel, kernel.launch + max(gap, called - now)

    def _launched(self, job: Job[_Cost]) -> None:
        if isinstance(job.cost, TransferDemand) and job.cost.units:
            self._hold(job.lane.rank, job.cost.units)

    def _body(self, job: Job[_Cost], now: float) -> None:
        job.body = now
        cost, rank = job.cost, job.lane.rank
        if isinstance(cost, TransferDemand):
            cap = cost.rate
            if cost.ends:
                self._copies[rank][job] = None
                cap /= self._slows_bytes(rank)
        else:
            if cost.body(self._machine.compute.units) <= 0.0:
                self._end(job, now)
                return
            cap = self._cap(cost, rank)
        job.flow = Flow(job, cost.size, cap, cost.draws, now)
        self._sharing.start(job.flow)
        if isinstance(cost, TransferDemand):
            self._flow_by(cost, cost.rate)
        else:
            self._kernel_of[rank] = job
            self._met[rank] = None

    def _flow_ended(self, flow: Flow, now: float) -> None:
        self._end(flow.owner, now)

    def _end(self, job: Job[_Cost], now: float) -> None:
        lane, cost = job.lane, job.cost
        if job.flow is not None:
            job.flow.version += 1
            self._sharing.stop(job.flow)
            job.flow = None  # otherwise every task would leave a reference cycle
        if isinstance(cost, TransferDemand):
            body = reach = cost.size / cost.rate
            delay = cost.completion
            if cost.units:
                self._hold(lane.rank, -cost.units)
            if cost.ends:
                del self._copies[lane.rank][job]
                self._flow_by(cost, -cost.rate)
        else:
            body, reach = cost.body(self._machine.compute.units), cost.reach
            delay = self._machine.launch.signal + self._machine.launch.poll
            if self._kernel_of.pop(lane.rank, None) is not None:
                self._met[lane.rank] = None
        self._finish(job, now, body, max(body, reach), delay)

    # -- contention --------------------------------------------------------------------------------

    def _flow_by(self, cost: TransferDemand, rate: float) -> None:
        """Called when bytes begin or cease to flow over the links of the ends of a copy."""
        if not self._contention.share:
            return
        for rank in cost.ends:  # a stream leaves one end and enters the other: half for each
            self._flowing[rank] += rate / 2.0
            self._crowd[rank] = None

    def _share_out(self) -> None:
        if self._met:
            if self._contention.share:
                for rank in self._met:
                    self._meet(rank)
                    self._crowd[rank] = None
            self._met = {}
        if self._crowd:
            for rank in self._crowd:
                self._recap(rank)
            self._crowd = {}

    def _meet(self, rank: int) -> None:
        """Called when a kernel has started or ended on a rank, which changes the speed of bytes
        over its links."""
        slower = self._slows_bytes(rank)
        for job in self._copies[rank]:
            if job.flow is not None and isinstance(job.cost, TransferDemand):
                self._sharing.set_cap(job.flow, job.cost.rate / slower)
        for port, capacity in self._node.ports(rank):
            self._sharing.set_capacity(port, capacity / slower)
        self._drive(rank)

    def _drive(self, rank: int) -> None:
        """Called when the bandwidth of core-driven copies out of a device has changed."""
        bandwidth = self._driving[rank] * self._node.driven_bandwidth / self._slows_bytes(rank)
        self._sharing.set_capacity(self._node.driven(rank), bandwidth)

    def _recap(self, rank: int) -> None:
        """Called when the load beside the kernel of a rank has changed. This also changes its
        memory bandwidth, which is lower for a kernel and bytes of peers together than for either
        alone."""
        job, slower = self._kernel_of.get(rank), 1.0
        if job is not None and job.flow is not None and isinstance(job.cost, KernelDemand):
            cap = self._cap(job.cost, rank)
            if cap != job.flow.cap:
                self._sharing.set_cap(job.flow, cap)
            slower = self._contention.slows_kernel(self._flowing[rank])
        bandwidth = self._node.memory_bandwidth(self._units(rank)) / slower
        memory = self._node.memory(rank)
        if bandwidth != memory.capacity:
            self._sharing.set_capacity(memory, bandwidth)

    def _hold(self, rank: int, units: int) -> None:
        """Takes compute units for a core-driven copy, or gives them back."""
        before = self._units(rank)
        self._held[rank] += units
        if self._units(rank) != before:
            self._crowd[rank] = None

    def _slows_bytes(self, rank: int) -> float:
        """The factor on the time of bytes over the links of a rank."""
        return self._contention.slows_bytes() if rank in self._kernel_of else 1.0

    def _units(self, rank: int) -> int:
        """The compute units that are left for the rank's kernel."""
        return max(1, self._machine.compute.units - min(self._held[rank], self._most_held))

    def _cap(self, kernel: KernelDemand, rank: int) -> float:
        units, meeting = self._units(rank), self._contention
        flowing = self._flowing[rank]
        if kernel.remote:  # its own bytes; peers take as many from this rank
            flowing += kernel.remote / max(kernel.body(units), kernel.reach)
        seconds = kernel.body(units) * meeting.slows_kernel(flowing)
        return kernel.size / max(seconds, kernel.reach * meeting.slows_bytes())


def _most_units(plan: Plan, machine: Machine) -> int:
    """The compute units with which core-driven copies of a rank saturate its links. If all ranks
    read the same data (a gather), fewer suffice than if each reads other data."""
    readers: dict[Region, int] = {}
    for task in plan.tasks:
        if (
            isinstance(task, Copy)
            and task.engine == "cores"
            and task.source.rank != task.rank
            and readers.setdefault(task.source, task.rank) != task.rank
        ):
            return machine.cores.all_gather_units
    return machine.cores.all_to_all_units
