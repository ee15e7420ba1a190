"""Runs a rank's part of a plan on the host fabric.

Engine lanes become a native program, launched at once with every command queued ahead. The compute
lane is carried out here: each task waits for the counters of what it needs, and loose ones are
taken as they become ready (`plan.adaptive`).

Until all headers are known to agree, a rank touches only its own memory and signals nothing: its
plan may have to be made anew, and peers must not take a counter of the old one for the new one's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from weft.errors import InvalidPlan, Unsupported
from weft.fabric import HostFabric, _native
from weft.fabric.lanes import Transfer
from weft.fabric.outcomes import AGAIN, CANCELLED, DISAGREE, OK, Outcome
from weft.plan.adaptive import Loose, as_one, largest_run, merged, next_run
from weft.plan.tasks import (
    AnyTask,
    Await,
    Copy,
    Lookup,
    Matmul,
    Permute,
    Plan,
    Reduce,
    Region,
    Tiles,
)
from weft.run.bags import Bags
from weft.timeline import COMPUTE, Span, Timeline

Counter = tuple[int, int]
NOTHING = Timeline(())
_MAX_PEER_TENSORS = 256


@dataclass(frozen=True, slots=True)
class Step:
    """A task of the compute lane with what was derived for it: counters of other lanes to wait
    for, loose tasks of this lane that come first, regions of peers, and its own counter."""

    task: AnyTask
    waits: tuple[Counter, ...]
    needs: frozenset[int]
    remote: tuple[Region, ...]
    counter: int
    rings: tuple[int, ...]


class _Disagree(Exception):
    """The headers of a call are not those that the plan was made for."""


class Runner:
    """A plan made ready for one rank: made once, run at every call."""

    def __init__(
        self,
        plan: Plan,
        fabric: HostFabric,
        signatures: Sequence[int],
        slots: Sequence[str],
        why: str = "",
    ) -> None:
        """signatures: what each rank's header must say. slots: the names of the buffers whose
        places the headers give, in their order. why: the reason for its schedule, where a peer's
        header told it."""
        self.plan = plan
        self.why = why
        self.fabric = fabric
        self.signatures = list(signatures)
        self.label = f"{plan.operation.label}, {plan.schedule}"
        self.buffers = [b for b in plan.buffers if b.rank == fabric.rank]
        self._index = {b.name: i for i, b in enumerate(self.buffers)}
        self._places = {rank: place for place, rank in enumerate(fabric.members)}
        self.here = self._places[fabric.rank]
        self._slots = {name: i for i, name in enumerate(slots)}
        missing = {name for _, name in self._touched_inside()} - set(slots)
        if missing:
            raise InvalidPlan(f"{self.label}: {', '.join(sorted(missing))} must be shared")
        counters = counters_of(plan, self._places)
        native, num_lanes = self._build_program(counters)
        transfers = self._build_transfers(counters)
        self.program = fabric.program(native, transfers, plan, signatures)
        steps = self._build_steps(counters)
        self.parts = _parts(steps)
        self.in_flight = num_lanes > 0 or bool(transfers) or any(step.waits for step in steps)
        self._workspace = [b for b in self.buffers if b.kind == "workspace" and b.name not in slots]
        self._shared = [b for b in self.buffers if b.kind == "workspace" and b.name in slots]
        self.workspace_bytes = sum(_aligned(b.num_bytes) for b in self._workspace)
        self._peers: dict[tuple[int, str, int], torch.Tensor] = {}

    def _touched_inside(self) -> frozenset[tuple[int, str]]:
        """Buffers that another rank of the machine touches: headers must say where they are."""
        if not self.fabric.network:
            return self.plan.shared_buffers
        places = self._places
        return frozenset(
            region.key
            for task in self.plan.tasks
            for region in (*task.reads(), *task.writes())
            if region.rank != task.rank and region.rank in places and task.rank in places
        )

    def _build_program(self, counters: Mapping[int, Counter]) -> tuple[_native.Program, int]:
        program, lanes = _native.Program(), set()
        for task in self.plan.tasks:
            if task.rank != self.fabric.rank or not isinstance(task, Copy):
                continue
            if task.source.rank not in self._places:
                continue
            lanes.add(task.peer)
            program.add(
                task.peer,
                task.id,
                task.engine == "cores",
                self._end(task.source),
                self._end(task.target),
                task.source.rows,
                self.plan.num_bytes(task.source) // task.source.rows,
                self._waits(task, counters),
                counters[task.id][1] if task.id in counters else -1,
                self._rings(task),
            )
        return program, len(lanes)

    def _build_transfers(self, counters: Mapping[int, Counter]) -> list[Transfer]:
        """This rank's ends of the copies between machines. What a copy comes after holds back its
        send if it runs where the source is, and its receive if it runs where the target is."""
        rank, transfers = self.fabric.rank, []
        for task in self.plan.tasks:
            if not isinstance(task, Copy) or rank not in (task.rank, task.source.rank):
                continue
            sends = task.rank != rank
            peer = task.rank if sends else task.source.rank
            if peer in self._places:
                continue
            region = task.source if sends else task.target
            counter = -1 if sends or task.id not in counters else counters[task.id][1]
            transfers.append(
                Transfer(
                    task.id,
                    peer,
                    sends,
                    self._index[region.buffer],
                    region,
                    self._waits(task, counters, rank),
                    counter,
                    () if sends else self._rings(task),
                )
            )
        return transfers

    def _end(self, region: Region) -> tuple[int, int, int, int]:
        buffer = self.plan.buffer[region.key]
        item = buffer.num_bytes // max(1, buffer.rows * buffer.columns)
        pitch = buffer.columns * item
        offset = region.row * pitch + region.column * item
        own = region.rank == self.fabric.rank
        number = self._index[region.buffer] if own else self._slots[region.buffer]
        return (self._places[region.rank], number, offset, pitch)

    def _waits(
        self, task: AnyTask, counters: Mapping[int, Counter], only: int | None = None
    ) -> tuple[Counter, ...]:
        """The counters of other lanes that a task waits for; only: those of one rank."""
        tasks = self.plan.tasks
        return tuple(
            counters[before]
            for before in task.after
            if (tasks[before].rank, tasks[before].lane) != (task.rank, task.lane)
            and (only is None or tasks[before].rank == only)
        )

    def _rings(self, task: AnyTask) -> tuple[int, ...]:
        waiting = self.plan.signals.get(task.id, frozenset())
        places = self._places
        near = {places[rank] for rank, lane in waiting if lane == COMPUTE and rank in places}
        return tuple(sorted(near))

    def _build_steps(self, counters: Mapping[int, Counter]) -> list[Step]:
        rank, tasks = self.fabric.rank, self.plan.tasks
        return [
            Step(
                task,
                self._waits(task, counters),
                frozenset(t for t in task.after if tasks[t].rank == rank and tasks[t].loose),
                tuple(r for r in (*task.reads(), *task.writes()) if r.rank != rank),
                counters[task.id][1] if task.id in counters else -1,
                self._rings(task),
            )
            for task in self.plan.lanes.get((rank, COMPUTE), ())
        ]

    def run(
        self,
        call: int,
        tensors: dict[str, torch.Tensor],
        shared: Mapping[str, torch.Tensor],
        record: bool,
    ) -> Timeline | None:
        """Carries out the call with the tensors of this rank by buffer name (workspace is added).
        shared: the memory of workspace that peers touch, by name.

        The rank must have entered the call. None if the headers of the ranks are not those that
        this runner was made for: then nothing has moved. Otherwise the timeline of this rank,
        without spans unless recording.
        """
        self._complete(tensors, shared)
        run = self.start(call, tensors, record)
        try:
            run.compute()
            run.finish()
        except _Disagree:
            return None
        except BaseException:
            run.quiesce()
            raise
        return run.timeline() if record else NOTHING

    def start(self, call: int, tensors: dict[str, torch.Tensor], record: bool) -> Run:
        return Run(self, call, tensors, record)

    def peer(self, call: int, region: Region) -> torch.Tensor:
        """A peer's buffer, in place. It lies where the peer's header says; peers that stage their
        inputs come back to the same two places, so the tensors are kept."""
        slot, place = self._slots[region.buffer], self._places[region.rank]
        pointer = self.fabric.native.peer_pointer(call, place, slot)
        key = (region.rank, region.buffer, pointer)
        tensor = self._peers.get(key)
        if tensor is None:
            b = self.plan.buffer[region.key]
            raw = self.fabric.native.peer_array(call, place, slot, b.num_bytes)
            tensor = torch.from_numpy(raw).view(getattr(torch, b.dtype)).view(b.rows, b.columns)
            if len(self._peers) >= _MAX_PEER_TENSORS:
                self._peers.clear()
            self._peers[key] = tensor
        return tensor

    def _complete(
        self, tensors: dict[str, torch.Tensor], shared: Mapping[str, torch.Tensor]
    ) -> None:
        """Adds workspace to the tensors of a call."""
        if self._workspace:
            self._add_workspace(tensors)
        for b in self._shared:
            if shared[b.name].numel() < b.num_bytes:
                raise InvalidPlan(f"{self.label}: {b.name} takes {b.num_bytes} shared bytes")
            raw = shared[b.name][: b.num_bytes]
            tensors[b.name] = raw.view(getattr(torch, b.dtype)).view(b.rows, b.columns)

    def place(self, rank: int) -> int:
        """The number of a rank among those that share this one's memory."""
        return self._places[rank]

    def _add_workspace(self, tensors: dict[str, torch.Tensor]) -> None:
        memory, at = self.fabric.workspace(self.workspace_bytes), 0
        for b in self._workspace:
            raw = memory[at : at + b.num_bytes]
            tensors[b.name] = raw.view(getattr(torch, b.dtype)).view(b.rows, b.columns)
            at += _aligned(b.num_bytes)


class Run:
    """One call in flight on one rank."""

    __slots__ = (
        "agreed",
        "call",
        "deadline",
        "fabric",
        "flight",
        "native",
        "pending",
        "plan",
        "record",
        "runner",
        "spans",
        "tensors",
    )

    def __init__(
        self, runner: Runner, call: int, tensors: dict[str, torch.Tensor], record: bool
    ) -> None:
        self.runner = runner
        self.plan = runner.plan
        self.fabric = runner.fabric
        self.native = runner.fabric.native
        self.call = call
        self.tensors = tensors
        self.record = record
        self.spans: list[Span] = []
        self.deadline = self.fabric.deadline_ns()
        self.agreed = self.fabric.world == 1
        self.pending: list[Step] = []
        self.flight: Any = None
        if runner.in_flight:
            buffers = [tensors[b.name] for b in runner.buffers]
            self.flight = self.fabric.launch(
                runner.program, call, self.deadline, buffers, runner.signatures, record
            )

    # -- waiting -----------------------------------------------------------------------------------

    def agree(self) -> None:
        """Waits until every rank has entered, with the header that the plan was made for."""
        if self.agreed:
            return
        signatures = self.runner.signatures
        outcome = self.fabric.wait(
            lambda: self.native.agree(self.call, signatures, self.deadline),
            self.runner.label,
            "all ranks to enter the call",
        )
        if outcome[0] == DISAGREE:
            self.quiesce()
            raise _Disagree
        self.agreed = True
        for step in self.pending:
            self.native.signal(self.call, step.counter, step.rings)

    def signal(self, step: Step) -> None:
        """Says that a task has ended; kept back until the ranks are known to agree."""
        if step.counter < 0:
            return
        if self.agreed:
            self.native.signal(self.call, step.counter, step.rings)
            return
        self.pending.append(step)
        if all(self.native.entered(rank) >= self.call for rank in range(self.fabric.world)):
            self.agree()

    def wait_for(self, step: Step) -> None:
        flight = self.flight
        assert flight is not None
        self.agree()
        for rank, counter in step.waits:
            outcome = self.fabric.wait(
                lambda r=rank, c=counter: self.native.wait(flight, r, c),  # type: ignore[misc]
                self.runner.label,
                f"what {step.task.label!r} needs",
            )
            if outcome[0] == CANCELLED:
                self._engine_failed(step.task.label)

    def _engine_failed(self, label: str) -> None:
        """An engine has stopped the call: says why, or that the headers disagree."""
        outcome = self.quiesce()
        if outcome[0] == DISAGREE:
            raise _Disagree
        raise self.fabric.failure(outcome, self.runner.label, f"what {label!r} needs")

    def quiesce(self) -> Outcome:
        """Waits until no engine touches a buffer of this call any more: after an error, none may
        once it has been raised."""
        if self.flight is None:
            return (OK, -1)
        self.native.cancel(self.flight)
        while (outcome := self.native.finish(self.flight))[0] == AGAIN:
            pass
        return outcome

    # -- compute -----------------------------------------------------------------------------------

    def compute(self) -> None:
        for part in self.runner.parts:
            if isinstance(part, list):
                self._adaptive(part)
                continue
            if part.remote:
                self.agree()
            if part.waits:
                self.wait_for(part)
            self._carry_out(part.task, part.remote)
            self.signal(part)

    def _adaptive(self, steps: Sequence[Step]) -> None:
        """Carries out what may run, matmuls in as few pieces as can be, until all is done."""
        flight = self.flight
        assert flight is not None
        of = {step.task.id: step for step in steps}
        waiting = dict(of)
        ready: dict[int, Loose] = {}
        while waiting or ready:
            seen = self.native.doorbell()
            self._collect(waiting, ready, of)
            if ready:
                run = next_run(list(ready.values()))
                remote = [region for task in run for region in of[task.id].remote]
                for task in run:
                    del ready[task.id]
                self._carry_out(as_one(run), remote)
                for task in run:
                    self.signal(of.pop(task.id))
                continue
            if not self.agreed:
                self.agree()
                continue
            label = next(iter(waiting.values())).task.label
            outcome = self.fabric.wait(
                lambda s=seen: self.native.wait_doorbell(flight, s),  # type: ignore[misc]
                self.runner.label,
                f"what {label!r} needs",
            )
            if outcome[0] == CANCELLED or self.native.outcome(flight)[0] != OK:
                self._engine_failed(label)

    def _collect(
        self, waiting: dict[int, Step], ready: dict[int, Loose], left: Mapping[int, Step]
    ) -> None:
        """Moves the tasks that may run now from `waiting` to `ready`. What waits for counters may
        not before the ranks agree: until then another plan may have set them."""
        steps = [
            step
            for step in waiting.values()
            if (self.agreed or not step.waits) and not any(task in left for task in step.needs)
        ]
        if not steps:
            return
        nothing = (self.runner.here, 0)
        first = self.native.reached(
            self.call, [step.waits[0] if step.waits else nothing for step in steps]
        )
        for step, arrived in zip(steps, first, strict=True):
            if arrived and len(step.waits) > 1:
                arrived = all(self.native.reached(self.call, step.waits))
            if arrived or not step.waits:
                del waiting[step.task.id]
                ready[step.task.id] = step.task  # type: ignore[assignment]

    def _carry_out(self, task: AnyTask, remote: Sequence[Region]) -> None:
        if not self.record and not (remote and self.fabric.link.paced):
            self._execute(task)
            return
        start = _native.now_ns()
        self._execute(task)
        for region in remote:
            ends = (self.runner.place(region.rank), self.runner.here)
            if region in task.writes():
                ends = ends[::-1]
            until = self.native.reserve(*ends, self.plan.num_bytes(region), start)
            self.pace(until, region)
        if self.record:
            self.spans.append(self._span(task, COMPUTE, start, _native.now_ns()))

    def pace(self, until: int, region: Region) -> None:
        """What was read or stored in place is through the link at a moment: holds the thread."""
        self.hold(until, f"{region} to come through the link")

    def hold(self, until: int, waiting_for: str) -> None:
        self.fabric.wait(
            lambda: self.native.hold(self.call, until, self.deadline),
            self.runner.label,
            waiting_for,
        )

    def _execute(self, task: AnyTask) -> None:
        if isinstance(task, Matmul):
            a = self._view(task.a)
            a = a.t() if task.transposed else a
            _multiply(a, self._view(task.b), self._view(task.c), task.accumulate)
        elif isinstance(task, Reduce):
            _add(list(map(self._view, task.sources)), list(map(self._view, task.targets)))
        elif isinstance(task, Tiles):
            for part in task.parts:
                _multiply(self._view(part.a), self._view(part.b), self._view(part.c), False)
        elif isinstance(task, Lookup):
            bags = cast(Bags, self.tensors["bags"])
            for s, target in zip(task.sources, task.targets, strict=True):
                bags.pool(s.row, s.rows, s.column, s.columns, self._view(target))
        elif isinstance(task, Await):
            pass
        elif isinstance(task, Permute):
            for source, target in zip(task.sources, task.targets, strict=True):
                self._view(target).copy_(self._view(source))
        else:
            raise Unsupported(f"compute cannot carry out {task.label!r}")

    def _view(self, region: Region) -> torch.Tensor:
        if region.rank == self.fabric.rank:
            tensor = self.tensors[region.buffer]
        else:
            tensor = self.runner.peer(self.call, region)
        rows, columns = tensor.shape
        if region.columns != columns:
            tensor = tensor.narrow(1, region.column, region.columns)
        if region.rows != rows:
            tensor = tensor.narrow(0, region.row, region.rows)
        return tensor

    # -- the end -----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Waits for the engines: copies that no task of this rank waits for may still run."""
        self.agree()
        flight = self.flight
        if flight is None:
            return
        outcome = self.fabric.wait(
            lambda: self.native.finish(flight), self.runner.label, "its own copy engines"
        )
        if outcome[0] != OK:
            self._engine_failed("the end of the call")

    def timeline(self) -> Timeline:
        tasks = self.plan.tasks
        spans = [
            self._span(tasks[task], tasks[task].lane, start, end)
            for task, start, end in (self.flight.spans if self.flight else ())
        ]
        return Timeline((*self.spans, *spans), str(self.plan.schedule))

    def _span(self, task: AnyTask, lane: str, start: int, end: int) -> Span:
        return span_of(self.plan, task, self.fabric.rank, lane, start, end)


def span_of(plan: Plan, task: AnyTask, rank: int, lane: str, start: int, end: int) -> Span:
    """The span of a task from one moment to another, in nanoseconds."""
    flops = task.num_flops if isinstance(task, Tiles) else 0
    if isinstance(task, Matmul):
        flops = 2 * task.c.num_elements * task.inner
    moved = sum(plan.num_bytes(r) for r in task.reads()) if not flops else 0
    return Span(rank, lane, task.label, task.kind, start / 1e9, end / 1e9, moved, flops)


def _multiply(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, accumulate: bool) -> None:
    if a.dtype != c.dtype:  # half precision, summed in float32
        a, b = a.to(c.dtype), b.to(c.dtype)
    if a.shape[1] == 0:
        if not accumulate:
            c.zero_()
    elif accumulate:
        torch.addmm(c, a, b, out=c)
    else:
        torch.mm(a, b, out=c)


def _add(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Every target = the sum of the sources in their order, rounded once."""
    first, rest = sources[0], sources[1:]
    total = targets[0]
    if len(sources) > 2 and total.dtype.itemsize < 4:
        total = first.float()
        for source in rest:
            total += source
        targets[0].copy_(total)
    elif rest:
        torch.add(first, rest[0], out=total)
        for source in rest[1:]:
            total += source
    else:
        total.copy_(first)
    for target in targets[1:]:
        target.copy_(targets[0])


def _parts(steps: Sequence[Step]) -> list[Step | list[Step]]:
    """The compute lane in the order in which it is carried out: single tasks, and stretches of
    tasks to be taken as they become ready. Tasks of a stretch that wait for nothing are ready
    together, so their pieces are fixed here."""
    parts: list[Step | list[Step]] = []
    for step in steps:
        if not step.task.loose:
            parts.append(step)
        elif parts and isinstance(parts[-1], list):
            parts[-1].append(step)
        else:
            parts.append([step])
    settled: list[Step | list[Step]] = []
    for part in parts:
        if isinstance(part, list) and not any(s.waits or s.needs or s.counter >= 0 for s in part):
            settled.extend(_pieces(part))
        else:
            settled.append(part)
    return settled


def _pieces(steps: Sequence[Step]) -> list[Step]:
    """The GEMMs that the adaptive policy makes of tasks that are all ready."""
    left = {step.task.id: step for step in steps}
    pieces = []
    while left:
        run = largest_run([step.task for step in left.values()])  # type: ignore[misc]
        remote = tuple(region for task in run for region in left[task.id].remote)
        for task in run:
            del left[task.id]
        pieces.append(Step(merged(run), (), frozenset(), remote, -1, ()))
    return pieces


def counters_of(plan: Plan, places: Mapping[int, int]) -> dict[int, Counter]:
    """The (place, index) of the counter of every task of these ranks that another lane waits for.
    Other ranks are on other machines, where tasks are waited for by transfers."""
    used = [0] * plan.operation.world
    counters: dict[int, Counter] = {}
    for task in plan.tasks:
        if task.id in plan.signals and task.rank in places:
            counters[task.id] = (places[task.rank], used[task.rank])
            used[task.rank] += 1
    if max(used) > _native.MAX_COUNTERS:
        raise Unsupported(
            f"{plan.schedule} cuts too fine: a rank signals {max(used)} tasks, "
            f"and the host fabric has {_native.MAX_COUNTERS} counters; use a smaller depth"
        )
    return counters


def _aligned(size: int) -> int:
    return -(-size // 64) * 64
