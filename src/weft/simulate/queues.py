"""The queues of a simulation: which task starts when, on any machine.

Lanes are queues. A task starts when its dependencies have ended and its lane is free. It has a
fixed part that uses no shared resource, and then a body of flows, which share resources. Among
loose tasks, `plan.adaptive` chooses the next one of the compute lane, and the decision takes time.
Subclasses of `Queues` define the costs and the bodies of tasks: `events.Events` for nodes of
devices, `host.HostEvents` for the cores of a host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any, Generic, TypeVar

from weft.errors import InvalidPlan
from weft.plan import adaptive
from weft.plan.tasks import AnyTask, Copy, Matmul, Plan, Reduce
from weft.simulate.result import Piece
from weft.simulate.sharing import Flow, Sharing

_SAME_TIME = 1e-12
"""Ends as close as this (in seconds, and as a share) are one event; they differ only by
rounding."""

_RELEASE, _BODY, _END = range(3)

Cost = TypeVar("Cost")


class Loose:
    """Adjacent tasks of a lane that may run in any order, and may be merged."""

    __slots__ = ("left", "ready")

    def __init__(self) -> None:
        self.left = 0
        self.ready: list[adaptive.Loose] = []

    def take(self) -> list[adaptive.Loose]:
        """Takes the next run out of the ready tasks and of those that are left."""
        run = adaptive.next_run(self.ready)
        taken = {task.id for task in run}
        self.ready = [task for task in self.ready if task.id not in taken]
        self.left -= len(run)
        return run


class Lane:
    """The state of a queue. `steps`: its fixed tasks and groups of loose ones, in order."""

    __slots__ = ("at", "busy", "ended", "rank", "steps")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.steps: list[AnyTask | Loose] = []
        self.at = 0
        self.busy = False
        self.ended = -1.0


class Job(Generic[Cost]):
    """A task, or a run of merged ones, that has started."""

    __slots__ = ("body", "cost", "flow", "lane", "run", "start", "task")

    def __init__(
        self, run: Sequence[AnyTask], task: AnyTask, lane: Lane, cost: Cost, start: float
    ) -> None:
        self.run = run
        self.task = task
        self.lane = lane
        self.cost = cost
        self.start = start
        self.body = start
        self.flow: Flow | None = None


class Queues(ABC, Generic[Cost]):
    """The tasks of a simulation in their lanes.

    `after`: for each task, the ids of these tasks that it waits for. It replaces `task.after`,
    which may contain tasks of other ranks.
    """

    def __init__(
        self,
        plan: Plan,
        tasks: Sequence[AnyTask],
        after: Sequence[Sequence[int]],
        decision: float,
    ) -> None:
        self._sharing = Sharing()
        self._decision = decision
        self._pieces: list[Piece] = []
        self._heap: list[tuple[float, int, int, Any]] = []
        self._num_events = 0
        self._left = len(tasks)
        self._waiting = [0] * len(plan.tasks)
        self._followers: list[list[AnyTask]] = [[] for _ in plan.tasks]
        self._lane_of: dict[int, Lane] = {}
        self._loose_of: dict[int, Loose] = {}
        self._queue(tasks, after)
        self._touched: dict[Lane, None] = dict.fromkeys(self._lane_of.values())

    @abstractmethod
    def _cost(self, task: AnyTask, lane: Lane, now: float) -> tuple[Cost, float]:
        """The cost of a task that starts now, and the seconds of its fixed part."""

    @abstractmethod
    def _body(self, job: Job[Cost], now: float) -> None:
        """Called when the fixed part of a job has ended. Its body becomes active."""

    @abstractmethod
    def _flow_ended(self, flow: Flow, now: float) -> None:
        """Called when a flow of a job's body has ended."""

    def _share_out(self) -> None:
        """Called after all events of one moment, before rates are computed."""

    def run(self, now: float = 0.0) -> list[Piece]:
        """Runs everything from `now` on; returns what ran, in the order of ends."""
        heap = self._heap
        while True:
            for lane in self._touched:
                self._dispatch(lane, now)
            self._touched = {}
            self._share_out()
            for flow in self._sharing.settle(now):
                if flow.owner is not None:
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
                        self._flow_ended(flow, now)
                elif kind == _BODY:
                    self._body(what, now)
                else:
                    self._release(what)
        if self._left:
            raise InvalidPlan(f"{self._left} tasks never start: they wait for each other")
        return self._pieces

    def _queue(self, tasks: Sequence[AnyTask], after: Sequence[Sequence[int]]) -> None:
        lanes: dict[tuple[int, int | None], Lane] = {}
        for task, before in zip(tasks, after, strict=True):
            key = (task.rank, task.peer if isinstance(task, Copy) else None)
            lane = lanes.get(key)
            if lane is None:
                lane = lanes[key] = Lane(task.rank)
            self._lane_of[task.id] = lane
            self._waiting[task.id] = len(before)
            for other in before:
                self._followers[other].append(task)
            if isinstance(task, Matmul | Reduce) and task.loose:
                loose = lane.steps[-1] if lane.steps else None
                if not isinstance(loose, Loose):
                    loose = Loose()
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

    def _dispatch(self, lane: Lane, now: float) -> None:
        """Starts the next task of a lane, if the lane is free and the task may start."""
        if lane.busy or lane.at == len(lane.steps):
            return
        step = lane.steps[lane.at]
        if isinstance(step, Loose):
            if step.ready:
                run = step.take()
                lane.at += step.left == 0
                self._start(lane, run, adaptive.as_one(run), self._decision, now)
        elif self._waiting[step.id] == 0:
            lane.at += 1
            self._start(lane, (step,), step, 0.0, now)

    def _start(
        self, lane: Lane, run: Sequence[AnyTask], task: AnyTask, decision: float, now: float
    ) -> None:
        cost, fixed = self._cost(task, lane, now)
        lane.busy = True
        job = Job(run, task, lane, cost, now)
        self._launched(job)
        self._begin_body(job, now + decision + fixed)

    def _begin_body(self, job: Job[Cost], when: float) -> None:
        """Sets when the fixed part of a job ends."""
        self._push(when, _BODY, job)

    def _launched(self, job: Job[Cost]) -> None:
        """Starts a job with its fixed part."""

    def _finish(self, job: Job[Cost], now: float, local: float, alone: float, delay: float) -> None:
        """Ends a job. Tasks on other lanes know it after `delay` seconds."""
        lane = job.lane
        self._pieces.append(Piece(tuple(job.run), job.task, job.start, job.body, now, local, alone))
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
        """Called when these tasks know that something they waited for has ended."""
        for task in followers:
            self._waiting[task.id] -= 1
            if self._waiting[task.id] == 0:
                loose = self._loose_of.get(task.id)
                if loose is not None and isinstance(task, Matmul | Reduce):
                    loose.ready.append(task)
                self._touched[self._lane_of[task.id]] = None
