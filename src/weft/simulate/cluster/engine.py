"""Runs the tasks of one device, which represents all: kernels, and collectives round by round.

Lanes are queues. Of the ready kernels, the one listed first is next; of communication, the one that
was ready first. Everything that runs shares links, network cards, cables and memory max-min fairly,
as inside a node. A collective counts as one flow on its busiest link, whatever the number of ranks
that it sends to. Kernels and transfers slow each other as inside a node (`simulate.contention`):
kernels in proportion to how full the links of the device are, transfers where they use these links.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from weft.errors import InvalidPlan
from weft.simulate.cluster.rounds import Round, coarse, streams, summing
from weft.simulate.cluster.wiring import Wiring
from weft.simulate.contention import Contention, contention
from weft.simulate.sharing import Flow, Resource, Sharing
from weft.timeline import COMMUNICATION, Span, Timeline

_SAME_TIME = 1e-12
_BODY, _END, _DONE = range(3)


@dataclass(frozen=True)
class ClusterKernel:
    """A task on the compute units: `launch` seconds, then `body(units)` seconds with `traffic`
    bytes of memory traffic."""

    launch: float
    body: Callable[[int], float]
    traffic: float = 0.0


@dataclass(frozen=True)
class ClusterTask:
    """A kernel, or rounds of communication. `after`: the positions of the tasks that it waits for.

    `start`: the seconds before anything moves. `units`: the compute units that communication holds.
    `weight`: its share of links against other flows, which have 1.
    """

    name: str
    lane: str
    kind: str = COMMUNICATION
    after: tuple[int, ...] = ()
    kernel: ClusterKernel | None = None
    rounds: tuple[Round, ...] = ()
    start: float = 0.0
    units: int = 0
    weight: float = 1.0
    num_bytes: int = 0
    num_flops: int = 0


@dataclass(frozen=True)
class Ran:
    """The times of all tasks on a device."""

    spans: tuple[Span, ...]
    events: int

    @property
    def seconds(self) -> float:
        return max((span.end for span in self.spans), default=0.0)

    def timeline(self, title: str = "") -> Timeline:
        """The device's spans as those of rank 0, which represents all ranks."""
        return Timeline(self.spans, title)

    def end_of(self, name: str) -> float:
        """The end of the last task whose name starts with this prefix."""
        return max((span.end for span in self.spans if span.task.startswith(name)), default=0.0)


def run(wiring: Wiring, tasks: Sequence[ClusterTask]) -> Ran:
    """Runs the tasks from time 0."""
    return _Engine(wiring, tasks).run()


@dataclass(eq=False)
class _Job:
    task: ClusterTask
    place: int
    start: float
    steps: list[tuple[Round, int]] = field(default_factory=list)
    at: int = 0  # the number of the step
    left: int = 0  # the remaining repetitions
    flowing: int = 0  # the flows of this step that have not ended
    flow: Flow | None = None  # the body of a kernel


class _Engine:
    def __init__(self, wiring: Wiring, tasks: Sequence[ClusterTask]) -> None:
        self._wiring = wiring
        self._tasks = tasks
        self._machine = wiring.cluster.machine
        self._sharing = Sharing()
        self._heap: list[tuple[float, int, int, Any]] = []
        self._events = 0
        self._ready: dict[str, list[tuple[int, int]]] = {}
        self._busy: dict[str, _Job | None] = {}
        self._waiting = [len(set(task.after)) for task in tasks]
        self._followers: list[list[int]] = [[] for _ in tasks]
        self._kernel: _Job | None = None
        # The active flows, each with its rate without contention; the bytes per second that leave.
        self._moving: dict[Flow, float] = {}
        self._flowing = 0.0
        self._released = 0
        self._left = len(tasks)
        self._held = 0
        self._spans: list[Span] = []
        # The rounds of a training step repeat, so flows are made from templates.
        self._templates: dict[
            int, tuple[Round, list[tuple[float, float, float, tuple[Any, ...]]]]
        ] = {}
        for place, task in enumerate(tasks):
            self._busy[task.lane] = None
            self._ready.setdefault(task.lane, [])
            for before in set(task.after):
                self._followers[before].append(place)
            if not task.after:
                self._release(place)

    def run(self) -> Ran:
        now, heap = 0.0, self._heap
        while True:
            self._dispatch(now)
            for flow in self._sharing.settle(now):
                self._push(now + max(0.0, flow.left) / flow.rate, _END, (flow, flow.version))
            if not heap:
                break
            now = heap[0][0]
            until = now + _SAME_TIME * (1.0 + now)
            while heap and heap[0][0] <= until:
                _, _, kind, what = heappop(heap)
                if kind == _BODY:
                    self._body(what[0], what[1], now)
                elif kind == _DONE:
                    self._step_done(what, now)
                elif what[0].version == what[1]:
                    self._flow_ended(what[0], now)
        if self._left:
            raise InvalidPlan("tasks never start: they wait for each other")
        return Ran(tuple(sorted(self._spans, key=lambda s: (s.start, s.end))), self._events)

    def _push(self, time: float, kind: int, what: object) -> None:
        self._events += 1
        heappush(self._heap, (time, self._events, kind, what))

    def _dispatch(self, now: float) -> None:
        for lane, ready in self._ready.items():
            if self._busy[lane] is None and ready:
                _, place = heappop(ready)
                task = self._tasks[place]
                job = self._busy[lane] = _Job(task, place, now)
                self._begin(job, now)

    def _begin(self, job: _Job, now: float) -> None:
        task = job.task
        if task.kernel is not None:
            self._push(now + task.start + task.kernel.launch, _BODY, (job, None))
            return
        job.steps = coarse(task.rounds)
        self._hold(task.units)
        if not job.steps:
            self._push(now + task.start, _DONE, job)
            return
        job.left = job.steps[0][0].repeat
        self._step(job, now + task.start)

    def _step(self, job: _Job, now: float) -> None:
        """Starts the flows of the next step, each after its latency."""
        round_, size = job.steps[job.at]
        template = self._template(round_)
        job.flowing = len(template)
        if not template:
            self._push(now, _DONE, job)
        for latency, bytes_, cap, draws in template:
            weight = job.task.weight
            if weight != 1.0:
                draws = tuple((resource, draw * weight) for resource, draw in draws)
            flow = Flow(job, bytes_ * size / weight, cap / weight, draws, now)
            self._push(now + latency * size, _BODY, (job, flow))

    def _template(self, round_: Round) -> list[tuple[float, float, float, tuple[Any, ...]]]:
        """The latency, size, cap and draws of each flow of a round.

        The rates of a round's flows are proportional to their sizes, as in a library that serves
        its peers in turn. Their weights make the flows on the busiest resource count as one.
        """
        known = self._templates.get(id(round_))
        if known is not None and known[0] is round_:
            return known[1]
        load: dict[Resource, float] = {}
        drawn: list[tuple[float, dict[Resource, float]]] = []
        for stream in streams(self._wiring, round_):
            amounts = {
                resource: amount
                for name, amount in stream.amounts.items()
                if (resource := self._wiring.resource(name)).capacity < float("inf")
            }
            drawn.append((stream.latency, amounts))
            for resource, amount in amounts.items():
                load[resource] = load.get(resource, 0.0) + amount
        busiest = max(load, key=lambda resource: load[resource] / resource.capacity, default=None)
        size = 0.0 if busiest is None else load[busiest]
        template = []
        for latency, amounts in drawn:
            draws = tuple((resource, amount / size) for resource, amount in amounts.items())
            cap = min(resource.capacity / draw for resource, draw in draws)
            template.append((latency, size, cap, draws))
        self._templates[id(round_)] = (round_, template)
        return template

    def _body(self, job: _Job, flow: Flow | None, now: float) -> None:
        """Called when a latency or a launch has ended. Bytes begin to flow."""
        if flow is None:
            kernel = job.task.kernel
            assert kernel is not None
            traffic = max(kernel.traffic, 1.0)
            if kernel.body(self._units) <= 0.0:
                self._finish(job, now)
                return
            flow = job.flow = Flow(job, traffic, self._cap(kernel), self._memory(traffic), now)
            self._kernel = job
            self._sharing.start(flow)
            self._meet()
            return
        flow.since = now
        self._moving[flow] = flow.cap
        self._flowing += _leaving(flow, flow.cap)
        if _inside(flow) and self._kernel is not None:
            flow.cap /= self._contention(job.task.units).slows_bytes()
        self._sharing.start(flow)
        self._recap()

    def _memory(self, traffic: float) -> tuple[Any, ...]:
        return ((self._wiring.memory(), 1.0),) if self._machine is not None and traffic > 1 else ()

    def _flow_ended(self, flow: Flow, now: float) -> None:
        job: _Job = flow.owner
        flow.version += 1
        self._sharing.stop(flow)
        if job.flow is flow:
            job.flow = self._kernel = None
            self._meet()
            self._finish(job, now)
            return
        self._flowing -= _leaving(flow, self._moving.pop(flow))
        self._recap()
        job.flowing -= 1
        if not job.flowing:
            round_, size = job.steps[job.at]
            pause = summing(self._wiring, round_) * size
            if pause:
                self._push(now + pause, _DONE, job)
            else:
                self._step_done(job, now)

    def _step_done(self, job: _Job, now: float) -> None:
        job.left -= 1
        if job.left <= 0:
            job.at += 1
            if job.at >= len(job.steps):
                self._hold(-job.task.units)
                self._finish(job, now)
                return
            job.left = job.steps[job.at][0].repeat
        self._step(job, now)

    def _finish(self, job: _Job, now: float) -> None:
        task = job.task
        sizes = (task.num_bytes, task.num_flops)
        joins = task.kernel is None and not task.rounds and now <= job.start
        if not joins:  # a task that only joins others has no span
            self._spans.append(Span(0, task.lane, task.name, task.kind, job.start, now, *sizes))
        self._left -= 1
        self._busy[task.lane] = None
        for place in self._followers[job.place]:
            self._waiting[place] -= 1
            if not self._waiting[place]:
                self._release(place)

    def _release(self, place: int) -> None:
        """Called when a task waits only for its lane."""
        task = self._tasks[place]
        self._released += 1
        rank = self._released if task.kernel is None else place
        heappush(self._ready[task.lane], (rank, place))

    def _hold(self, units: int) -> None:
        """Takes compute units for communication, or gives them back."""
        if not units:
            return
        self._held += units
        self._recap()

    def _recap(self) -> None:
        """Called when the load beside the kernel has changed."""
        job = self._kernel
        if job is not None and job.flow is not None and job.task.kernel is not None:
            self._sharing.set_cap(job.flow, self._cap(job.task.kernel))

    def _meet(self) -> None:
        """Called when a kernel has started or ended, which changes the speed of bytes over the
        links of the device."""
        for flow, alone in self._moving.items():
            if _inside(flow):
                meeting = self._contention(flow.owner.task.units)
                slower = meeting.slows_bytes() if self._kernel is not None else 1.0
                self._sharing.set_cap(flow, alone / slower)

    def _contention(self, units: int) -> Contention:
        if self._machine is None:
            return Contention(0.0, 1.0)
        engine = "cores" if units else "dma"
        return contention(self._machine, engine, self._machine.links.world)

    @property
    def _units(self) -> int:
        if self._machine is None:
            return 1
        return max(1, self._machine.compute.units - self._held)

    def _cap(self, kernel: ClusterKernel) -> float:
        seconds = kernel.body(self._units)
        seconds *= self._contention(self._held).slows_kernel(max(0.0, self._flowing))
        return max(kernel.traffic, 1.0) / seconds


def _inside(flow: Flow) -> bool:
    """Whether bytes use the links inside the node, and not only the network card."""
    return any(resource.name[0] == "out" for resource, _ in flow.draws)


def _leaving(flow: Flow, rate: float) -> float:
    """The bytes per second of a flow that leave the device, over links and network card."""
    return sum(
        rate * draw for resource, draw in flow.draws if resource.name[0] in ("out", "card out")
    )
