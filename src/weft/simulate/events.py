"""Runs a plan on a node of devices: a fluid event simulation of all ranks over shared resources.

Tasks start as `queues` says: a fixed part (a command, a launch, a decision), then a body that
flows: links, engines and memory of both ends for copies; compute units, memory and, for operands
read in place, links for kernels. Whenever a body starts or ends, what is active shares anew.

- Engine commands are queued ahead. One that finds its lane still busy follows with a packet's gap;
  one that finds it idle has to be released first.
- A copy driven by cores takes compute units from the kernel beside it while its bytes flow.
- A waiter on another lane learns of an end only after its signal, so there are gaps between spans.
- Where a rank's compute lane is one kernel, only its first task is launched: the others follow as
  its workers come to them.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.machine import Machine
from weft.plan.tasks import AnyTask, Copy, Plan, Region
from weft.simulate.demand import Demands, Kernel, Transfer
from weft.simulate.node import Node
from weft.simulate.queues import Job, Lane, Queues
from weft.simulate.sharing import Flow

_Cost = Kernel | Transfer


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
        self._machine = machine
        self._one_launch = plan.one_launch
        self._node = Node(machine, plan.operation.world, folded)
        self._demands = Demands(plan, self._node)
        self._kernel_of: dict[int, Job[_Cost]] = {}
        self._held = [0] * plan.operation.world
        self._most_held = _most_units(plan, machine)

    def _cost(self, task: AnyTask, lane: Lane, now: float) -> tuple[_Cost, float]:
        if isinstance(task, Copy):
            transfer = self._demands.transfer(task)
            return transfer, transfer.next if lane.ended == now else transfer.first
        kernel = self._demands.kernel(task)
        if self._one_launch and lane.ended >= 0.0:
            return kernel, 0.0
        return kernel, kernel.launch + (self._machine.launch.gap if lane.ended >= 0.0 else 0.0)

    def _body(self, job: Job[_Cost], now: float) -> None:
        job.body = now
        cost, rank = job.cost, job.lane.rank
        if isinstance(cost, Transfer):
            cap = cost.rate
            if cost.units:
                self._hold(rank, cost.units)
        else:
            if cost.body(self._machine.compute.units) <= 0.0:
                self._end(job, now)
                return
            self._kernel_of[rank] = job
            cap = self._cap(cost, rank)
        job.flow = Flow(job, cost.size, cap, cost.draws, now)
        self._sharing.start(job.flow)

    def _flow_ended(self, flow: Flow, now: float) -> None:
        self._end(flow.owner, now)

    def _end(self, job: Job[_Cost], now: float) -> None:
        lane, cost = job.lane, job.cost
        if job.flow is not None:
            job.flow.version += 1
            self._sharing.stop(job.flow)
            job.flow = None  # a cycle otherwise, of which there would be one per task
        if isinstance(cost, Transfer):
            body = reach = cost.size / cost.rate
            delay = cost.completion
            if cost.units:
                self._hold(lane.rank, -cost.units)
        else:
            body, reach = cost.body(self._machine.compute.units), cost.reach
            delay = self._machine.launch.signal + self._machine.launch.poll
            self._kernel_of.pop(lane.rank, None)
        self._finish(job, now, body, max(body, reach), delay)

    def _hold(self, rank: int, units: int) -> None:
        """Compute units are taken for a core-driven copy, or given back."""
        before = self._units(rank)
        self._held[rank] += units
        left = self._units(rank)
        job = self._kernel_of.get(rank)
        if job is not None and job.flow is not None and isinstance(job.cost, Kernel):
            self._sharing.set_cap(job.flow, self._cap(job.cost, rank))
        if left != before:
            memory = self._node.memory(rank)
            self._sharing.set_capacity(memory, self._node.memory_bandwidth(left))

    def _units(self, rank: int) -> int:
        """Compute units that are left to the rank's kernel."""
        return max(1, self._machine.compute.units - min(self._held[rank], self._most_held))

    def _cap(self, kernel: Kernel, rank: int) -> float:
        seconds = kernel.body(self._units(rank))
        if self._held[rank]:
            seconds *= 1.0 + self._machine.cores.interference
        return kernel.size / seconds


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
