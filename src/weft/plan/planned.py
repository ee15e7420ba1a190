"""The adaptive policy, decided ahead: which chunks are multiplied together is fixed in the plan.

A stream cannot look which chunks have arrived. So the policy of `adaptive.py` runs here, on the
times that a link and a GEMM are expected to take, and its choices become ordinary tasks. Every rank
does this for all ranks with the same numbers, and `verify` proves the new plan like any other. If a
chunk is late, the GEMM that needs it waits. Chunks that are multiplied together are also copied
together.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from weft.errors import InvalidPlan
from weft.plan.adaptive import as_one, next_run
from weft.plan.order import predecessors
from weft.plan.tasks import AnyTask, Copy, KernelTiles, Matmul, Plan, Reduce, Region

GPU_TILE = 128
"""The rows and columns of a tile in the GEMM libraries of GPUs."""


class Rates(NamedTuple):
    """What decides when chunks arrive and GEMMs end: bytes per second of a link and of memory,
    operations per second of a GEMM, the seconds that a copy and a launch cost by themselves, and
    the tiles that a GEMM is made of: how many at once, and their rows and columns. loads_ahead:
    whether a GEMM loads its operands while it computes, as on a GPU. On a CPU it does not, so that
    every piece pays for the whole weight."""

    link: float
    flops: float
    memory: float
    latency: float = 2e-6
    launch: float = 5e-6
    units: int = 1
    tile: int = 64
    loads_ahead: bool = True

    def seconds(self, plan: Plan, task: AnyTask) -> float:
        """The expected time of a task."""
        if isinstance(task, Copy):
            return self.latency + plan.num_bytes(task.source) / self.link
        if isinstance(task, Matmul):
            parts = self._computing(task), self._touching(plan, task)
            return self.launch + (max(parts) if self.loads_ahead else sum(parts))
        if isinstance(task, KernelTiles):
            return self.launch + task.num_flops / self.flops
        return self.launch + self._touching(plan, task)

    def _computing(self, task: Matmul) -> float:
        """The time of a GEMM by its tiles: as many at once as there are units, each as a whole."""
        tiles = -(-task.c.rows // self.tile) * -(-task.c.columns // self.tile)
        one = 2 * self.tile**2 * task.inner * self.units / self.flops
        return -(-tiles // self.units) * one

    def _touching(self, plan: Plan, task: AnyTask) -> float:
        """The time in which memory moves what a task reads and writes."""
        return sum(map(plan.num_bytes, (*task.reads(), *task.writes()))) / self.memory


def planned(plan: Plan, rates: Rates) -> Plan:
    """The plan with its loose tasks in the order, and in the GEMMs, that the policy would choose.
    Tasks are listed in the order in which they are expected to start."""
    if not any(task.loose for task in plan.tasks):
        return plan
    return _joined(_Rehearsal(plan, rates).plan())


def _joined(plan: Plan) -> Plan:
    """The plan with one copy for chunks that follow each other, in a lane and in memory, and that
    the same tasks wait for."""
    followers: list[set[int]] = [set() for _ in plan.tasks]
    for task in plan.tasks:
        for before in task.after:
            followers[before].add(task.id)
    runs: list[list[AnyTask]] = []
    open_run: dict[tuple[int, str], list[AnyTask]] = {}
    for task in plan.tasks:
        key = (task.rank, task.lane)
        run = open_run.get(key)
        if run is not None and _follows(run[-1], task, followers):
            run.append(task)
        else:
            open_run[key] = [task]
            runs.append(open_run[key])
    return _renumbered(plan, [(_as_one_copy(run), tuple(t.id for t in run)) for run in runs])


def _follows(first: AnyTask, second: AnyTask, followers: Sequence[set[int]]) -> bool:
    """Whether a copy continues the one before it."""
    if not (isinstance(first, Copy) and isinstance(second, Copy)):
        return False
    alike = (first.engine, first.peer, first.after) == (second.engine, second.peer, second.after)
    plain = not (first.also or second.also or first.swaps or second.swaps)
    return (
        alike
        and plain
        and followers[first.id] == followers[second.id]
        and _adjacent(first.source, second.source)
        and _adjacent(first.target, second.target)
    )


def _adjacent(first: Region, second: Region) -> bool:
    sides = (first.key, first.column, first.columns) == (second.key, second.column, second.columns)
    return sides and first.row + first.rows == second.row


def _as_one_copy(run: Sequence[AnyTask]) -> AnyTask:
    first, last = run[0], run[-1]
    if len(run) == 1 or not isinstance(first, Copy) or not isinstance(last, Copy):
        return first
    rows = last.source.row + last.source.rows - first.source.row
    return replace(
        first,
        label=f"{first.label} +{len(run) - 1}",
        source=first.source._replace(rows=rows),
        target=first.target._replace(rows=rows),
    )


def _renumbered(plan: Plan, runs: Sequence[tuple[AnyTask, tuple[int, ...]]]) -> Plan:
    """The plan of these tasks, each with the ids of those that it was made from, in an order in
    which lanes run. A task waits for what any of those waited for."""
    number = {old: new for new, (_, members) in enumerate(runs) for old in members}
    tasks = []
    for new, (task, members) in enumerate(runs):
        after = {number[other] for member in members for other in plan.tasks[member].after}
        fixed: dict[str, Any] = {"id": new, "after": tuple(sorted(after - {new}))}
        if isinstance(task, Matmul):
            fixed["merge"] = None
        elif isinstance(task, Reduce):
            fixed["early"] = False
        tasks.append(replace(task, **fixed))
    return replace(plan, tasks=tuple(tasks))


class _Rehearsal:
    """One expected run of a plan on all ranks."""

    def __init__(self, plan: Plan, rates: Rates) -> None:
        self._plan, self._rates = plan, rates
        before = predecessors(plan)
        self._missing = [len(needs) for needs in before]
        self._followers: list[list[int]] = [[] for _ in before]
        for task, needs in enumerate(before):
            for other in needs:
                self._followers[other].append(task)
        self._ready: dict[tuple[int, str], set[int]] = {key: set() for key in plan.lanes}
        self._busy: set[tuple[int, str]] = set()
        self._ends: list[tuple[float, int, tuple[int, str], tuple[int, ...]]] = []
        self._runs: list[tuple[AnyTask, tuple[int, ...]]] = []
        """Tasks in the order in which they start, each with the ids of what it was merged from."""
        for task, count in enumerate(self._missing):
            if not count:
                self._ready[self._lane(task)].add(task)

    def plan(self) -> Plan:
        now = 0.0
        for key in self._plan.lanes:
            self._start(key, now)
        while self._ends:
            now = self._ends[0][0]
            changed: dict[tuple[int, str], None] = {}
            while self._ends and self._ends[0][0] == now:  # what ends together is seen together
                _, _, key, members = heapq.heappop(self._ends)
                self._busy.discard(key)
                changed[key] = None
                for member in members:
                    for follower in self._followers[member]:
                        self._missing[follower] -= 1
                        if not self._missing[follower]:
                            lane = self._lane(follower)
                            self._ready[lane].add(follower)
                            changed[lane] = None
            for key in changed:
                self._start(key, now)
        if sum(len(members) for _, members in self._runs) != len(self._plan.tasks):
            raise InvalidPlan(f"{self._plan.schedule}: its tasks wait for each other")
        return _renumbered(self._plan, self._runs)

    def _lane(self, task: int) -> tuple[int, str]:
        found = self._plan.tasks[task]
        return (found.rank, found.lane)

    def _start(self, key: tuple[int, str], now: float) -> None:
        """Starts the next task of a lane, if the lane is free and a task is ready."""
        ready = self._ready[key]
        if key in self._busy or not ready:
            return
        tasks = [self._plan.tasks[task] for task in sorted(ready)]
        loose: list[Any] = [task for task in tasks if task.loose]
        run: Sequence[AnyTask] = next_run(loose) if loose else tasks[:1]
        whole = as_one(run) if loose else run[0]  # type: ignore[arg-type]
        members = tuple(task.id for task in run)
        ready.difference_update(members)
        self._busy.add(key)
        self._runs.append((whole, members))
        end = now + self._rates.seconds(self._plan, whole)
        heapq.heappush(self._ends, (end, members[0], key, members))
