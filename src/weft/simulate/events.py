"""Runs a plan on a node of devices: a fluid event simulation of all ranks over shared resources.

Tasks start as `queues` says: a fixed part (a command, a launch, a decision), then a body that
flows: links, engines and memory of both ends for copies; compute units, memory and, for operands
read in place, links for kernels. Whenever a body starts or ends, what is active shares anew.

- Engine commands are queued ahead. One that finds its lane still busy follows with a packet's gap;
  one that finds it idle has to be released first.
- The host launches kernel after kernel, so one may have to wait for its launch; in a captured graph
  (`Machine.captured`) none does.
- A copy driven by cores takes compute units from the kernel beside it, from its launch to its end.
- Memory serves requests in the order of arrival, so where more is asked for than there is, all are
  slowed alike.
- Kernels and bytes beside them slow each other as `contention` says.
- A waiter on another lane learns of an end only after its signal, so there are gaps between spans.
- Where a rank's compute lane is one kernel, only its first task is launched: the others follow as
  its workers come to them.
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
    """One simulation: `tasks` are those of all ranks, or of rank 0 where it stands for all."""

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
        # By rank: copies that it has commanded and whose bytes flow over links, bytes per second
        # that leave it (as many enter it), and what of its core-driven bandwidth has units.
        self._contention = contention(machine, plan.schedule.engine, world)
        self._copies: list[dict[Job[_Cost], None]] = [{} for _ in range(world)]
        self._flowing = [0.0] * world
        self._driving = [1.0] * world
        # Ranks where, at this moment, a kernel has started or ended, and what runs beside one has
        # changed: many copies start and end at once.
        self._met: dict[int, None] = {}
        self._crowd: dict[int, None] = {}

    def _cost(self, task: AnyTask, lane: Lane, now: float) -> tuple[_Cost, float]:
        if isinstance(task, Copy):
            transfer = self._demands.transfer(task)
            return transfer, transfer.next if lane.ended == now else transfer.first
        kernel = self._demands.kernel(task)
        if self._one_launch and lane.ended >= 0.0:
            return kernel, 0.0
        # The device sees its first kernel at time 0, and each further one a host's call later.
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
            job.flow = None  # a cycle otherwise, of which there would be one per task
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

    # -- what meets --------------------------------------------------------------------------------

    def _flow_by(self, cost: TransferDemand, rate: float) -> None:
        """Bytes flow over the links of the ends of a copy, or no longer do."""
        if not self._contention.share:
            return
        for rank in cost.ends:  # a stream leaves one of them and enters the other: half for each
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
        """A kernel has started or ended on a rank: bytes that pass its links feel it."""
        slower = self._slows_bytes(rank)
        for job in self._copies[rank]:
            if job.flow is not None and isinstance(job.cost, TransferDemand):
                self._sharing.set_cap(job.flow, job.cost.rate / slower)
        for port, capacity in self._node.ports(rank):
            self._sharing.set_capacity(port, capacity / slower)
        self._drive(rank)

    def _drive(self, rank: int) -> None:
        """What core-driven copies bring out of a device has changed."""
        bandwidth = self._driving[rank] * self._node.driven_bandwidth / self._slows_bytes(rank)
        self._sharing.set_capacity(self._node.driven(rank), bandwidth)

    def _recap(self, rank: int) -> None:
        """What runs beside the kernel of a rank has changed; so has what its memory gives, which is
        less to a kernel and bytes of peers at once than to either."""
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
        """Compute units are taken for a core-driven copy, or given back."""
        before = self._units(rank)
        self._held[rank] += units
        if self._units(rank) != before:
            self._crowd[rank] = None

    def _slows_bytes(self, rank: int) -> float:
        """How many times as long bytes over the links of a rank take."""
        return self._contention.slows_bytes() if rank in self._kernel_of else 1.0

    def _units(self, rank: int) -> int:
        """Compute units that are left to the rank's kernel."""
        return max(1, self._machine.compute.units - min(self._held[rank], self._most_held))

    def _cap(self, kernel: KernelDemand, rank: int) -> float:
        units, meeting = self._units(rank), self._contention
        flowing = self._flowing[rank]
        if kernel.remote:  # bytes of its own; mirrored by what peers take from this rank
            flowing += kernel.remote / max(kernel.body(units), kernel.reach)
        seconds = kernel.body(units) * meeting.slows_kernel(flowing)
        return kernel.size / max(seconds, kernel.reach * meeting.slows_bytes())


def _most_units(plan: Plan, machine: Machine) -> int:
    """Compute units with which core-driven copies of a rank saturate its links: fewer where
    everyone reads the same (a gather) than where everyone reads something else."""
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
