"""A plan compiled for one rank of a fabric of processes: native copies, counters and waits.

Engine lanes become a native program, which is launched with all its commands at once. A task that
another lane waits for has a counter, which is set to the number of the call when the task ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from weft.errors import InvalidPlan, Unsupported
from weft.fabric import _native
from weft.fabric.host.process_call import ProcessCall
from weft.fabric.host.process_flight import ProcessFlight, StoringFlight
from weft.fabric.host.product_repeat import ProductRepeat
from weft.fabric.proposal import Proposal
from weft.fabric.reach import Transfer, WorkspaceBlock
from weft.plan.tasks import AnyTask, Buffer, Copy, Plan, Region
from weft.timeline import COMPUTE

if TYPE_CHECKING:
    from weft.fabric.processes import ProcessFabric

Counter = tuple[int, int]
"""(place of the rank in the machine, index)."""
SMALL = "the copies are small: unless recorded, the thread that waits for them makes them"
"""How a call is carried out whose copies take less time than to wake an engine."""
_MAX_PEER_TENSORS = 256
_MAX_PARTS = 256


class Signals(NamedTuple):
    """The waits and the signal of a task of the compute lane. `remote`: it touches peers'
    memory."""

    waits: tuple[Counter, ...]
    remote: bool
    counter: int
    rings: tuple[int, ...]


class EngineProgram:
    """Implements `weft.fabric.Program`: made once, started at every call."""

    computes = True
    shares = True
    quick = False

    def __init__(
        self, plan: Plan, fabric: ProcessFabric, slots: Sequence[str], signatures: Sequence[int]
    ) -> None:
        self.plan = plan
        self.fabric = fabric
        self.signatures = list(signatures)
        self.label = f"{plan.operation.label}, {plan.schedule}"
        self.places = {rank: place for place, rank in enumerate(fabric.reach.members)}
        self.here = self.places[fabric.rank]
        self.buffers = [b for b in plan.buffers if b.rank == fabric.rank]
        self._index = {b.name: i for i, b in enumerate(self.buffers)}
        self._slots = {name: i for i, name in enumerate(slots)}
        missing = {name for _, name in self._touched_inside()} - set(slots)
        if missing:
            raise InvalidPlan(f"{self.label}: {', '.join(sorted(missing))} must be shared")
        counters = counters_of(plan, self.places)
        copies, num_lanes = self._copies(counters)
        self._small = copies if num_lanes and len(self.places) == fabric.world else None
        transfers = self._transfers(counters)
        self.engines = fabric.reach.program(copies, transfers, plan, signatures)
        lane = plan.lanes.get((fabric.rank, COMPUTE), ())
        self.signals = {task.id: self.signals_of(task, counters) for task in lane}
        self.flies = num_lanes > 0 or bool(transfers) or any(s.waits for s in self.signals.values())
        """Whether a flight must be launched: for copies, or for waits that can be cancelled."""
        workspace = [b for b in self.buffers if b.kind == "workspace"]
        self._private = [b for b in workspace if b.name not in slots]
        self._shared = [b for b in workspace if b.name in slots]
        self.workspace_bytes = sum(_aligned(b.num_bytes) for b in self._private)
        self._peers: dict[tuple[int, str, int], torch.Tensor] = {}

    @property
    def way(self) -> str:
        small = self._small is not None and self.fabric.heap.is_small(self._small)
        return SMALL if small else ""

    def start(
        self, call: ProcessCall, tensors: dict[str, torch.Tensor], record: bool
    ) -> ProcessFlight:
        call.label = self.label
        self.add_workspace(call.shared, tensors)
        kind = StoringFlight if self.plan.one_launch else ProcessFlight
        return kind(self, call.number, tensors, record)

    def alone(self, proposal: Proposal, tensors: dict[str, torch.Tensor]) -> None:
        return None

    def repeat(self, proposal: Proposal) -> ProductRepeat | None:
        return None

    def _touched_inside(self) -> frozenset[tuple[int, str]]:
        """Buffers that another rank of the machine touches: headers must carry their addresses."""
        places = self.places
        if len(places) == self.fabric.world:
            return self.plan.shared_buffers
        return frozenset(
            region.key
            for task in self.plan.tasks
            for region in (*task.reads(), *task.writes())
            if region.rank != task.rank and region.rank in places and task.rank in places
        )

    def _copies(self, counters: Mapping[int, Counter]) -> tuple[_native.Program, int]:
        """The copies of this rank inside the machine, and how many lanes they have."""
        program, lanes = _native.Program(), set()
        for task in self.plan.tasks:
            if task.rank != self.fabric.rank or not isinstance(task, Copy):
                continue
            if task.source.rank not in self.places:
                continue
            lanes.add(task.peer)
            program.add(
                task.peer,
                task.id,
                task.engine == "cores",
                self.end_of(task.source),
                self.end_of(task.target),
                task.source.rows,
                self.plan.num_bytes(task.source) // task.source.rows,
                self.waits_of(task, counters),
                counters[task.id][1] if task.id in counters else -1,
                self._rings(task),
            )
        return program, len(lanes)

    def _transfers(self, counters: Mapping[int, Counter]) -> list[Transfer]:
        """This rank's ends of the copies between machines. A dependency of a copy delays its send
        if it runs on the rank of the source, and its receive if it runs on the rank of the
        target."""
        rank, transfers = self.fabric.rank, []
        for task in self.plan.tasks:
            if not isinstance(task, Copy) or rank not in (task.rank, task.source.rank):
                continue
            sends = task.rank != rank
            peer = task.rank if sends else task.source.rank
            if peer in self.places:
                continue
            region = task.source if sends else task.target
            transfers.append(
                Transfer(
                    task.id,
                    peer,
                    sends,
                    self._index[region.buffer],
                    region,
                    self.waits_of(task, counters, rank),
                    -1 if sends or task.id not in counters else counters[task.id][1],
                    () if sends else self._rings(task),
                )
            )
        return transfers

    def signals_of(self, task: AnyTask, counters: Mapping[int, Counter]) -> Signals:
        rank = self.fabric.rank
        return Signals(
            self.waits_of(task, counters),
            any(r.rank != rank for r in (*task.reads(), *task.writes())),
            counters[task.id][1] if task.id in counters else -1,
            self._rings(task),
        )

    def end_of(self, region: Region) -> tuple[int, int, int, int]:
        """A region for native code: place, buffer or slot, offset and pitch in bytes."""
        buffer = self.plan.buffer[region.key]
        item = buffer.num_bytes // max(1, buffer.rows * buffer.columns)
        pitch = buffer.columns * item
        offset = region.row * pitch + region.column * item
        return (self.places[region.rank], self.number_of(region), offset, pitch)

    def number_of(self, region: Region) -> int:
        """The number of a region's buffer: of this rank's own, or the slot in a peer's header."""
        own = region.rank == self.fabric.rank
        return (self._index if own else self._slots)[region.buffer]

    def waits_of(
        self, task: AnyTask, counters: Mapping[int, Counter], only: int | None = None
    ) -> tuple[Counter, ...]:
        """The counters of other lanes that a task waits for. only: those of this rank alone."""
        tasks = self.plan.tasks
        return tuple(
            counters[before]
            for before in task.after
            if (tasks[before].rank, tasks[before].lane) != (task.rank, task.lane)
            and (only is None or tasks[before].rank == only)
        )

    def _rings(self, task: AnyTask) -> tuple[int, ...]:
        """The ranks of the machine whose compute may sleep until a task ends."""
        waiting = self.plan.signals.get(task.id, frozenset())
        places = self.places
        near = {places[rank] for rank, lane in waiting if lane == COMPUTE and rank in places}
        return tuple(sorted(near))

    def peer_tensor(self, call: int, region: Region) -> torch.Tensor:
        """A peer's buffer, in place, at the address in the peer's header. Peers that stage their
        inputs use the same two addresses again, so the tensors are cached."""
        slot, place, heap = self._slots[region.buffer], self.places[region.rank], self.fabric.heap
        pointer = heap.peer_pointer(call, place, slot)
        key = (region.rank, region.buffer, pointer)
        tensor = self._peers.get(key)
        if tensor is None:
            b = self.plan.buffer[region.key]
            raw = heap.peer_array(call, place, slot, b.num_bytes)
            with torch.inference_mode(False):  # later calls may be outside of it
                whole = torch.from_numpy(raw).view(getattr(torch, b.dtype))
                tensor = whole.view(b.rows, b.columns)
            if len(self._peers) >= _MAX_PEER_TENSORS:
                self._peers.clear()
            self._peers[key] = tensor
        return tensor

    def add_workspace(
        self, shared: Mapping[str, WorkspaceBlock], tensors: dict[str, torch.Tensor]
    ) -> None:
        """Adds the plan's workspace to the tensors of a call. shared: what peers may touch of
        it."""
        if self._private:
            block, at = self.fabric.memory.private(self.workspace_bytes), 0
            for b in self._private:
                tensors[b.name] = self._part(b, block, at)
                at += _aligned(b.num_bytes)
        for b in self._shared:
            tensors[b.name] = self._part(b, shared[b.name], 0)

    def _part(self, b: Buffer, block: WorkspaceBlock, at: int) -> torch.Tensor:
        """A buffer in memory that is kept between calls, and so is its tensor."""
        key = (at, b.dtype, b.rows, b.columns)
        part = block.parts.get(key)
        if part is None:
            if block.size < at + b.num_bytes:
                raise InvalidPlan(f"{self.label}: {b.name} takes {b.num_bytes} shared bytes")
            with torch.inference_mode(False):  # later calls may be outside of it
                raw = block.memory[at : at + b.num_bytes]
                part = raw.view(getattr(torch, b.dtype)).view(b.rows, b.columns)
            if len(block.parts) >= _MAX_PARTS:
                block.parts.clear()
            block.parts[key] = part
        return part


def counters_of(plan: Plan, places: Mapping[int, int]) -> dict[int, Counter]:
    """The counters of the tasks that another lane waits for, on the ranks of this machine. On other
    machines transfers wait for tasks."""
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
