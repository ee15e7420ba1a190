"""Runs a plan on a host whose ranks are processes: threads share cores, and paced links take time.

The body of a task is up to two flows at once, in seconds: its time on a core, and its time on a
link. The task ends when both have ended.

    task                    core                          link           while only the link is busy
    matmul, permute         all of it                     -              -
    matmul read in place    all of it                     its operands   holds the core
    copy by `dma`           moving the bytes, waking up   its bytes      sleeps
    copy by `cores`         moving the bytes              its bytes      holds the core

Compute uses as many cores as its rank has threads, a copy uses one. Threads on one core share it
equally, as the scheduler of the operating system does. So a GEMM of one thread beside one
core-driven copy takes twice as long, and more threads than cores slow each other. At memory speed
there is no link, and a copy takes only core time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from weft.machine import HostCores, Machine
from weft.plan.tasks import AnyTask, Await, Copy, KernelTiles, Lookup, Matmul, Plan, Region
from weft.simulate.cost import gemm, memory_bound
from weft.simulate.demand import runs_of
from weft.simulate.node import Node
from weft.simulate.queues import Job, Lane, Queues
from weft.simulate.sharing import Flow, Resource

Draws = tuple[tuple[Resource, float], ...]


@dataclass(frozen=True, slots=True)
class HostWork:
    """The seconds of a task on its core and on links. `first` and `next`: its fixed part on an idle
    and on a busy lane. `completion`: the time until a waiting task knows its end."""

    core: float
    link: float
    route: Draws
    holds_core: bool
    first: float
    next: float
    completion: float


class _Flight:
    """The flows of a running job. `held`: the core on which it spins while it waits."""

    __slots__ = ("core", "held", "link")

    def __init__(self) -> None:
        self.core: Flow | None = None
        self.link: Flow | None = None
        self.held: Flow | None = None


class HostEvents(Queues[HostWork]):
    """One simulation of all ranks."""

    def __init__(self, plan: Plan, machine: Machine, host: HostCores) -> None:
        after = [task.after for task in plan.tasks]
        super().__init__(plan, plan.tasks, after, machine.launch.decision)
        self._plan = plan
        self._machine = machine
        self._host = host
        self._node = Node(machine, plan.operation.world, False)
        self._cores = _cores(host.cores, plan.operation.world)
        self._flights: dict[Job[HostWork], _Flight] = {}
        self._works: dict[tuple[object, ...], HostWork] = {}
        self._behind: dict[Lane, float] = {}
        self._turns: dict[Lane, float] = {}
        self._spinning = dict.fromkeys(self._cores, 0)

    # -- costs -------------------------------------------------------------------------------------

    def _cost(self, task: AnyTask, lane: Lane, now: float) -> tuple[HostWork, float]:
        key = _key(task)
        work = self._works.get(key)
        if work is None:
            work = self._works[key] = self._work(task)
        fixed = work.next if lane.ended == now else work.first
        if _spins(task, work):
            core = self._cores[lane.rank]
            if lane.ended < 0.0:
                # It starts when the threads that started before it have had their time slices.
                fixed += self._spinning[core] // core.capacity * self._host.slice
            self._spinning[core] += 1
        return work, fixed + self._behind.pop(lane, 0.0)

    def _work(self, task: AnyTask) -> HostWork:
        machine = self._machine
        if isinstance(task, Copy):
            return self._copy(task)
        if isinstance(task, Await):
            return self._kernel(0.0, 0.0, ())
        if isinstance(task, KernelTiles):
            core = 0.0
            for part in task.parts:
                dtype = self._plan.buffer[part.a.key].dtype
                m, n = part.c.rows, part.c.columns
                core += self._product(m, n, part.b.rows, dtype)
            return self._in_place(task, core)
        if not isinstance(task, Matmul):
            read = sum(map(self._plan.num_bytes, task.sources))
            if isinstance(task, Lookup):
                read *= task.pooling
            written = sum(map(self._plan.num_bytes, task.targets))
            moving = memory_bound(machine, read, written).memory_seconds
            core = moving + len(task.sources) * self._host.region
            return self._in_place(task, core)
        dtype = self._plan.buffer[task.a.key].dtype
        core = self._product(task.c.rows, task.c.columns, task.inner, dtype)
        return self._in_place(task, core)

    def _product(self, m: int, n: int, k: int, dtype: str) -> float:
        cost = gemm(self._machine, m, n, k, dtype)
        if not self._machine.limited_by_memory:
            return cost.compute_seconds
        return max(cost.compute_seconds, cost.memory_seconds)

    def _in_place(self, task: AnyTask, core: float) -> HostWork:
        """A task of the compute lane that waits until its regions of peers are transferred. Many
        threads together can be faster than a link that no copying thread fills."""
        links = self._machine.links
        read = [(r, r.rank, task.rank) for r in task.reads() if r.rank != task.rank]
        written = [(r, task.rank, r.rank) for r in task.writes() if r.rank != task.rank]
        if not (read or written) or not (self._linked or self._host.threads > 1):
            return self._kernel(core, 0.0, ())
        region, source, target = (read + written)[0]
        link = self._plan.num_bytes(region) / links.to_one_peer() + links.latency
        return self._kernel(core, link, self._route(source, target))

    def _kernel(self, core: float, link: float, route: Draws) -> HostWork:
        launch = self._machine.launch
        return HostWork(
            core, link, route, True, launch.kernel, launch.kernel, launch.signal + launch.poll
        )

    def _copy(self, task: Copy) -> HostWork:
        machine, engines, host = self._machine, self._machine.engines, self._host
        size, runs = self._plan.num_bytes(task.source), runs_of(self._plan, task)
        source, target = task.source.rank, task.target.rank
        remote = source != target
        bandwidth = engines.bandwidth if remote else engines.local_bandwidth
        core = size / bandwidth + (runs - 1) * engines.row
        first, completion = engines.release + engines.packet, engines.completion
        if not remote or not self._linked:
            return HostWork(core, 0.0, (), True, first, engines.next_packet, completion)
        rate, spins = machine.links.to_one_peer(), task.engine == "cores"
        if not spins:
            rows = task.source.rows
            at_once = max(1.0, max(rate * host.turn, host.turn_bytes) // (size / rows))
            core += host.nap * ceil(rows / at_once)
        completion += machine.links.latency
        route = self._route(source, target)
        return HostWork(core, size / rate, route, spins, first, engines.next_packet, completion)

    @property
    def _linked(self) -> bool:
        """Whether links are slower than a copying thread; otherwise they are never the limit."""
        return self._machine.links.to_one_peer() < self._machine.engines.bandwidth

    def _route(self, source: int, target: int) -> Draws:
        links = self._machine.links
        return self._node.draws(self._node.route(source, target, links.to_one_peer()))

    # -- events ------------------------------------------------------------------------------------

    def _body(self, job: Job[HostWork], now: float) -> None:
        job.body = now
        flight = self._flights[job] = _Flight()
        if job.cost.link > 0.0:
            flight.link = self._flow(job, job.cost.link, job.cost.route, now)
        if job.cost.core > 0.0:
            threads = 1 if isinstance(job.task, Copy) else self._host.threads
            flight.core = self._flow(job, job.cost.core, self._cores_of(job, threads), now)
        self._settle(job, flight, now)

    def _flow_ended(self, flow: Flow, now: float) -> None:
        job: Job[HostWork] = flow.owner
        flight = self._flights[job]
        self._stop(flow)
        if flow is flight.core:
            flight.core = None
        else:
            flight.link = None
        self._settle(job, flight, now)

    def _settle(self, job: Job[HostWork], flight: _Flight, now: float) -> None:
        if flight.core is not None:
            return
        if flight.link is not None:
            if job.cost.holds_core and flight.held is None:
                flight.held = self._flow(None, 1.0, self._cores_of(job), now)
            return
        delay = job.cost.completion
        if flight.held is not None:
            self._stop(flight.held)
            delay += self._late(job, now)
        if _spins(job.task, job.cost):
            self._spinning[self._cores[job.lane.rank]] -= 1
        del self._flights[job]
        self._finish(job, now, job.cost.core, max(job.cost.core, job.cost.link), delay)

    def _flow(self, job: Job[HostWork] | None, seconds: float, draws: Draws, now: float) -> Flow:
        flow = Flow(job, seconds, 1.0, draws, now)
        self._sharing.start(flow)
        return flow

    def _stop(self, flow: Flow) -> None:
        flow.version += 1
        self._sharing.stop(flow)

    def _cores_of(self, job: Job[HostWork], threads: int = 1) -> Draws:
        return ((self._cores[job.lane.rank], float(threads)),)

    def _late(self, job: Job[HostWork], now: float) -> float:
        """The seconds until a waiting task continues after the link of a spinning thread is done.

        Threads on one core take turns of one time slice, and a thread notices the end of its link
        only in its turn. The next copy counts from the end of the link, unless that was more than
        `grace` ago. The copy, and the next task of compute, start when the thread has noticed. A
        waiting thread that slept must then get the core from threads that still spin.
        """
        core, host, lane = self._cores[job.lane.rank], self._host, job.lane
        copies = isinstance(job.task, Copy)
        round_ = (len(core.flows) // core.capacity + 1.0) * host.slice
        since = (now - self._turns.setdefault(lane, job.body)) % round_ if round_ else 0.0
        late = 0.0 if since <= host.slice else round_ - since
        if late > host.grace or not copies:
            self._behind[lane] = late
            self._turns[lane] = now + late
        if copies and self._asleep(job):
            more = lane.at < len(lane.steps)
            late += (len(core.flows) + more) // core.capacity * host.slice / 2.0
        return late

    def _asleep(self, job: Job[HostWork]) -> bool:
        """Whether a task on another lane of the rank waits only for this one."""
        lanes = {
            self._lane_of[follower.id] for task in job.run for follower in self._followers[task.id]
        }
        return any(not lane.busy for lane in lanes if lane is not job.lane)


def _spins(task: AnyTask, work: HostWork) -> bool:
    """Whether an engine spins until its link is done."""
    return work.holds_core and work.link > 0.0 and isinstance(task, Copy)


def _cores(cores: int, world: int) -> list[Resource]:
    """The cores of every rank: its own ones, or one that it shares with other ranks."""
    if cores < world:
        shared = [Resource(("core", core, 0), 1.0) for core in range(cores)]
        return [shared[rank % cores] for rank in range(world)]
    counts = [(rank + 1) * cores // world - rank * cores // world for rank in range(world)]
    return [Resource(("core", rank, 0), float(count)) for rank, count in enumerate(counts)]


def _key(task: AnyTask) -> tuple[object, ...]:
    """A key that is equal for tasks of a plan with equal costs."""
    if isinstance(task, Copy):
        here, there = task.source, task.target
        return (task.rank, here.key, there.key, here.rows, here.columns, task.engine)

    def size(region: Region) -> tuple[object, ...]:
        return (region.key, region.rows, region.columns)

    pooling = (task.pooling,) if isinstance(task, Lookup) else ()
    sizes = (*map(size, task.reads()), *map(size, task.writes()))
    return (task.rank, task.kind, *pooling, *sizes)
