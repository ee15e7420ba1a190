"""The adaptive policy, decided ahead: which chunks are multiplied together is fixed in the plan.

A stream cannot look which chunks have arrived. So the policy of `adaptive.py` runs here, on the
times that a link and a GEMM are expected to take, and its choices become ordinary tasks. Every rank
does this for all ranks with the same numbers, and `verify` proves the new plan like any other. If a
chunk is late, the GEMM that needs it waits.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.errors import InvalidPlan
from weft.plan.adaptive import as_one, next_run
from weft.plan.order import predecessors
from weft.plan.tasks import AnyTask, Copy, Matmul, Plan, Reduce, Tiles


@dataclass(frozen=True, slots=True)
class Rates:
    """What decides when chunks arrive and GEMMs end: bytes per second of a link and of memory,
    operations per second of a GEMM, and the seconds that a copy and a launch cost by themselves."""

    link: float
    flops: float
    memory: float
    latency: float = 2e-6
    launch: float = 5e-6

    def seconds(self, plan: Plan, task: AnyTask) -> float:
        """The expected time of a task."""
        if isinstance(task, Copy):
            return self.latency + plan.num_bytes(task.source) / self.link
        if isinstance(task, Matmul):
            return self.launch + 2 * task.c.num_elements * task.inner / self.flops
        if isinstance(task, Tiles):
            return self.launch + task.num_flops / self.flops
        touched = sum(map(plan.num_bytes, (*task.reads(), *task.writes())))
        return self.launch + touched / self.memory


def planned(plan: Plan, rates: Rates) -> Plan:
    """The plan with its loose tasks in the order, and in the GEMMs, that the policy would choose.
    Tasks are listed in the order in which they are expected to start."""
    if not any(task.loose for task in plan.tasks):
        return plan
    return _Rehearsal(plan, rates).plan()


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
        return self._rewritten()

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

    def _rewritten(self) -> Plan:
        """The plan of the runs, numbered anew."""
        number = {old: new for new, (_, members) in enumerate(self._runs) for old in members}
        tasks = []
        for new, (task, members) in enumerate(self._runs):
            after = {
                number[other] for member in members for other in self._plan.tasks[member].after
            }
            fixed: dict[str, Any] = {"id": new, "after": tuple(sorted(after - {new}))}
            if isinstance(task, Matmul):
                fixed["merge"] = None
            elif isinstance(task, Reduce):
                fixed["early"] = False
            tasks.append(replace(task, **fixed))
        return replace(self._plan, tasks=tuple(tasks))
