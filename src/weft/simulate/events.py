"""Runs a plan on a machine: a fluid event simulation of all ranks over shared resources.

Lanes are queues. A task starts when what it waits for has ended and its lane is free. First comes
a fixed part (a command, a launch, a decision) that uses nothing others could use, then a body that
flows: links, engines and memory of both ends for copies; compute units, memory and, for operands
read in place, links for kernels. Whenever a body starts or ends, what is active shares anew.

- Engine commands are queued ahead. One that finds its lane still busy follows with a packet's gap;
  one that finds it idle has to be released first.
- A copy driven by cores takes compute units from the kernel beside it while its bytes flow.
- A waiter on another lane learns of an end only after its signal, so there are gaps between spans.
- Of loose tasks, the compute lane takes those that `plan.adaptive` says and pays for the decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any

from weft.errors import InvalidPlan
from weft.machine import Machine
from weft.plan.adaptive import Loose, as_one, next_run
from weft.plan.tasks import AnyTask, Copy, Matmul, Plan, Reduce, Region
from weft.simulate.demand import Demands, Kernel, Transfer
from weft.simulate.node import Node
from weft.simulate.result import Piece
from weft.simulate.sharing import Flow, Sharing

_SAME_TIME = 1e-12
"""Ends this close (seconds, and as a share) are one event: they differ by rounding only."""

_RELEASE, _BODY, _END = range(3)


class _Loose:
    """Neighbouring tasks of a lane that may run in any order, merged."""

    __slots__ = ("left", "ready")

    def __init__(self) -> None:
        self.left = 0
        self.ready: list[Loose] = []

    def take(self) -> list[Loose]:
        """The run that comes next; it is no longer ready, nor left."""
        run = next_run(self.ready)
        taken = {task.id for task in run}
        self.ready = [task for task in self.ready if task.id not in taken]
        self.left -= len(run)
        return run


class _Lane:
    """A queue in its present state. `steps` are fixed tasks and groups of loose ones, in order."""

    __slots__ = ("at", "busy", "ended", "rank", "steps")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.steps: list[AnyTask | _Loose] = []
        self.at = 0
        self.busy = False
        self.ended = -1.0


class _Job:
    """A task, or a run of merged ones, that has started."""

    __slots__ = ("body", "cost", "flow", "lane", "run", "start", "task")

    def __init__(
        self,
        run: Sequence[AnyTask],
        task: AnyTask,
        lane: _Lane,
        cost: Kernel | Transfer,
        start: float,
    ) -> None:
        self.run = run
        self.task = task
        self.lane = lane
        self.cost = cost
        self.start = start
        self.body = start
        self.flow: Flow | None = None


class Events:
    """One simulation: `tasks` are those of all ranks, or of rank 0 where it stands for all.

    `after` has, for each of them, the ids it waits for among these; it stands in for `task.after`,
    which may name tasks of other ranks.
    """

    def __init__(
        self,
        plan: Plan,
        machine: Machine,
        tasks: Sequence[AnyTask],
        after: Sequence[Sequence[int]],
        folded: bool,
    ) -> None:
        self._machine = machine
        self._node = Node(machine, plan.operation.world, folded)
        self._demands = Demands(plan, self._node)
        self._sharing = Sharing()
        self._pieces: list[Piece] = []
        self._heap: list[tuple[float, int, int, Any]] = []
        self._num_events = 0
        self._kernel_of: dict[int, _Job] = {}
        self._held = [0] * plan.operation.world
        self._most_held = _most_units(plan, machine)
        self._left = len(tasks)
        self._waiting = [0] * len(plan.tasks)
        self._followers: list[list[AnyTask]] = [[] for _ in plan.tasks]
        self._lane_of: dict[int, _Lane] = {}
        self._loose_of: dict[int, _Loose] = {}
        self._queue(tasks, after)
        self._touched: dict[_Lane, None] = dict.fromkeys(self._lane_of.values())

    def run(self) -> list[Piece]:
        """Everything that ran, in the order in which it ended."""
        now, heap = 0.0, self._heap
        while True:
            for lane in self._touched:
                self._dispatch(lane, now)
            self._touched = {}
            for flow in self._sharing.settle(now):
                self._push(now + max(0.0, flow.left) / flow.rate, _END, (flow, flow.version))
            if not heap:
                break
            now = heap[0][0]
            until = now + _SAME_TIME * (1.0 + now)
            while heap and heap[0][0] <= until:
                _, _, kind, what = heappop(heap)
                if kind == _END:
                    flow, version = what
                    if flow.version == version:
                        self._end(flow.owner, now)
                elif kind == _BODY:
                    self._body(what, now)
                else:
                    self._release(what)
        if self._left:
            raise InvalidPlan(f"{self._left} tasks never start: they wait for each other")
        return self._pieces

    def _queue(self, tasks: Sequence[AnyTask], after: Sequence[Sequence[int]]) -> None:
        lanes: dict[tuple[int, int | None], _Lane] = {}
        for task, before in zip(tasks, after, strict=True):
            key = (task.rank, task.peer if isinstance(task, Copy) else None)
            lane = lanes.get(key)
            if lane is None:
                lane = lanes[key] = _Lane(task.rank)
            self._lane_of[task.id] = lane
            self._waiting[task.id] = len(before)
            for other in before:
                self._followers[other].append(task)
            if isinstance(task, Matmul | Reduce) and task.loose:
                loose = lane.steps[-1] if lane.steps else None
                if not isinstance(loose, _Loose):
                    loose = _Loose()
                    lane.steps.append(loose)
                loose.left += 1
                self._loose_of[task.id] = loose
                if not before:
                    loose.ready.append(task)
            else:
                lane.steps.append(task)

    def _push(self, time: float, kind: int, what: object) -> None:
        self._num_events += 1
        heappush(self._heap, (time, self._num_events, kind, what))

    def _dispatch(self, lane: _Lane, now: float) -> None:
        """Starts what comes next on a lane, if the lane is free and it may start."""
        if lane.busy or lane.at == len(lane.steps):
            return
        step = lane.steps[lane.at]
        if isinstance(step, _Loose):
            if step.ready:
                run = step.take()
                lane.at += step.left == 0
                self._start(lane, run, as_one(run), self._machine.launch.decision, now)
        elif self._waiting[step.id] == 0:
            lane.at += 1
            self._start(lane, (step,), step, 0.0, now)

    def _start(
        self, lane: _Lane, run: Sequence[AnyTask], task: AnyTask, fixed: float, now: float
    ) -> None:
        cost: Transfer | Kernel
        if isinstance(task, Copy):
            cost = self._demands.transfer(task)
            fixed += cost.next if lane.ended == now else cost.first
        else:
            cost = self._demands.kernel(task)
            fixed += cost.launch + (self._machine.launch.gap if lane.ended >= 0.0 else 0.0)
        lane.busy = True
        self._push(now + fixed, _BODY, _Job(run, task, lane, cost, now))

    def _body(self, job: _Job, now: float) -> None:
        """The fixed part of a job is over: its body joins what is active."""
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

    def _end(self, job: _Job, now: float) -> None:
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
        piece = Piece(tuple(job.run), job.task, job.start, job.body, now, body, max(body, reach))
        self._pieces.append(piece)
        self._left -= len(job.run)
        lane.busy = False
        lane.ended = now
        self._touched[lane] = None
        there: list[AnyTask] = []
        for task in job.run:
            for follower in self._followers[task.id]:
                if self._lane_of[follower.id] is lane or delay == 0.0:
                    self._release((follower,))
                else:
                    there.append(follower)
        if there:
            self._push(now + delay, _RELEASE, there)

    def _release(self, followers: Sequence[AnyTask]) -> None:
        """Something that these tasks waited for has ended, and they know it."""
        for task in followers:
            self._waiting[task.id] -= 1
            if self._waiting[task.id] == 0:
                loose = self._loose_of.get(task.id)
                if loose is not None and isinstance(task, Matmul | Reduce):
                    loose.ready.append(task)
                self._touched[self._lane_of[task.id]] = None

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
