"""The tasks of a plan over named buffer regions: pure data, no torch, no processes.

A task runs on one lane of one rank. Lanes are queues: a rank's compute lane and each of its engine
lanes run their tasks in the order of the plan. Across lanes, only `after` orders tasks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from weft.dtype import ITEM_BYTES
from weft.operation import Operation
from weft.schedule import Engine, Schedule
from weft.strategy import Strategy
from weft.timeline import COMPUTE

BufferKind = Literal["input", "output", "workspace", "inplace"]


@dataclass(frozen=True, slots=True)
class Buffer:
    """A matrix in the memory of one rank. Buffers of kind `input` and `inplace` hold data before
    the plan starts."""

    name: str
    rank: int
    rows: int
    columns: int
    kind: BufferKind
    dtype: str

    @property
    def num_bytes(self) -> int:
        return self.rows * self.columns * ITEM_BYTES[self.dtype]

    def all(self) -> Region:
        return Region(self.rank, self.name, 0, self.rows, 0, self.columns)

    def rows_of(self, row: int, rows: int) -> Region:
        return Region(self.rank, self.name, row, rows, 0, self.columns)


class Region(NamedTuple):
    """A rectangle of a buffer. A tuple, because a plan has many of them."""

    rank: int
    buffer: str
    row: int
    rows: int
    column: int
    columns: int

    @property
    def num_elements(self) -> int:
        return self.rows * self.columns

    @property
    def key(self) -> tuple[int, str]:
        return (self.rank, self.buffer)

    def __str__(self) -> str:
        rows = f"{self.row}:{self.row + self.rows}"
        columns = f"{self.column}:{self.column + self.columns}"
        return f"{self.buffer}@{self.rank}[{rows}, {columns}]"


@dataclass(frozen=True, slots=True)
class Task:
    """The fields of every task. `after` lists the ids of the tasks that must end first."""

    id: int
    rank: int
    after: tuple[int, ...]
    label: str

    kind: ClassVar[str] = "task"

    @property
    def lane(self) -> str:
        return COMPUTE

    @property
    def loose(self) -> bool:
        """Whether the adaptive policy may reorder it among its loose neighbours."""
        return False

    def reads(self) -> tuple[Region, ...]:
        raise NotImplementedError

    def writes(self) -> tuple[Region, ...]:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Copy(Task):
    """Copies a region on the engine lane of a peer. Source and target have the same shape.

    One command may also write the same bytes to further targets (`also`), or exchange source and
    target (`swaps`). A command that is not `prelaunched` is launched only when it is ready to run.
    """

    source: Region
    target: Region
    engine: Engine
    peer: int
    also: tuple[Region, ...] = ()
    swaps: bool = False
    prelaunched: bool = True

    kind: ClassVar[str] = "copy"

    @property
    def lane(self) -> str:
        return f"engine {self.peer}"

    def reads(self) -> tuple[Region, ...]:
        if self.swaps:
            return (self.source, self.target)
        return (self.source,) * (1 + len(self.also))

    def writes(self) -> tuple[Region, ...]:
        return (self.target, self.source) if self.swaps else (self.target, *self.also)


@dataclass(frozen=True, slots=True)
class Matmul(Task):
    """c = a @ b, or c += a @ b if `accumulate`.

    Among tasks with the same `merge`, the executor may run adjacent ready tasks as one GEMM, in any
    order (the adaptive policy). None fixes the task and its order. If `transposed`, c = a.T @ b.
    """

    a: Region
    b: Region
    c: Region
    accumulate: bool = False
    merge: int | None = None
    transposed: bool = False

    kind: ClassVar[str] = "matmul"

    @property
    def loose(self) -> bool:
        return self.merge is not None

    @property
    def inner(self) -> int:
        """The number of terms in each element of the product."""
        return self.b.rows

    def reads(self) -> tuple[Region, ...]:
        return (self.a, self.b, self.c) if self.accumulate else (self.a, self.b)

    def writes(self) -> tuple[Region, ...]:
        return (self.c,)


@dataclass(frozen=True, slots=True)
class Permute(Task):
    """Copies regions within a rank on its compute lane: packs, unpacks, or changes the dtype."""

    sources: tuple[Region, ...]
    targets: tuple[Region, ...]

    kind: ClassVar[str] = "permute"

    def reads(self) -> tuple[Region, ...]:
        return self.sources

    def writes(self) -> tuple[Region, ...]:
        return self.targets


@dataclass(frozen=True, slots=True)
class Reduce(Task):
    """Every target = the sum of the sources in the given order, on the compute lane.

    The sum is accumulated in float32 (float64 for float64) and rounded once. Sources may be in
    another rank's memory. `early` lets the policy run the sum as soon as its sources are ready.
    """

    sources: tuple[Region, ...]
    targets: tuple[Region, ...]
    early: bool = False

    kind: ClassVar[str] = "reduce"

    @property
    def loose(self) -> bool:
        return self.early

    def reads(self) -> tuple[Region, ...]:
        return self.sources

    def writes(self) -> tuple[Region, ...]:
        return self.targets


@dataclass(frozen=True, slots=True)
class Part:
    """One of the products of a kernel: c = a @ b."""

    a: Region
    b: Region
    c: Region

    @property
    def num_flops(self) -> int:
        return 2 * self.c.num_elements * self.b.rows


@dataclass(frozen=True, slots=True)
class KernelTiles(Task):
    """Products that the workers of one kernel compute. They store each where it is needed: c may be
    in the memory of any rank."""

    parts: tuple[Part, ...]

    kind: ClassVar[str] = "matmul"

    def reads(self) -> tuple[Region, ...]:
        return tuple(region for part in self.parts for region in (part.a, part.b))

    def writes(self) -> tuple[Region, ...]:
        return tuple(part.c for part in self.parts)

    @property
    def num_flops(self) -> int:
        return sum(part.num_flops for part in self.parts)


@dataclass(frozen=True, slots=True)
class Lookup(Task):
    """Pools rows of embedding tables into bags, and stores each bag where it is needed.

    The sources are regions of `bags`, an input that is never in memory: row b, column c stands for
    column c of the tables, pooled over the rows of bag b. `pooling` is the mean number of rows in a
    bag (0 if unknown).
    """

    sources: tuple[Region, ...]
    targets: tuple[Region, ...]
    pooling: int

    kind: ClassVar[str] = "lookup"

    def reads(self) -> tuple[Region, ...]:
        return self.sources

    def writes(self) -> tuple[Region, ...]:
        return self.targets


@dataclass(frozen=True, slots=True)
class Await(Task):
    """Waits for all tasks in `after`: the end of a kernel into whose outputs peers store."""

    kind: ClassVar[str] = "await"

    def reads(self) -> tuple[Region, ...]:
        return ()

    def writes(self) -> tuple[Region, ...]:
        return ()


AnyTask = Copy | Matmul | Permute | Reduce | KernelTiles | Lookup | Await


class Plannable(Operation, Protocol):
    """An operation that can lower itself and check the contents of its outputs. `routed`, if it has
    this, says that the sizes of single ranks follow from data and change between calls.

    `one_collective(rank)`, if it has this, returns the `OneCollective` that does all communication
    of a serial schedule, or None. A fabric may then run that instead of the tasks of the plan."""

    def lower(self, schedule: Any) -> Plan:
        """The plan of all ranks, cached per schedule. For independent work, `schedule` is a
        `Strategy`."""
        ...

    def check(self, plan: Plan, contents: Any) -> None:
        """Raises `InvalidPlan` unless the traced contents are what the operation defines."""
        ...


@dataclass(frozen=True)
class Plan:
    """The tasks of every rank. The executor and the simulator read only this.

    workspace: per rank, the bytes that the plan needs beyond inputs and outputs; `verify` checks
    it. one_launch: whether the tasks of a rank's compute lane are one persistent kernel, which is
    launched once and communicates by itself. Otherwise every task is a launch.
    """

    operation: Plannable
    schedule: Schedule | Strategy
    buffers: tuple[Buffer, ...]
    tasks: tuple[AnyTask, ...]
    workspace: tuple[int, ...] = field(default=())
    one_launch: bool = False

    @cached_property
    def buffer(self) -> dict[tuple[int, str], Buffer]:
        """Buffers by (rank, name)."""
        return {(b.rank, b.name): b for b in self.buffers}

    @cached_property
    def lanes(self) -> dict[tuple[int, str], tuple[AnyTask, ...]]:
        """The queue of every (rank, lane), in order."""
        lanes: dict[tuple[int, str], list[AnyTask]] = {}
        for task in self.tasks:
            lanes.setdefault((task.rank, task.lane), []).append(task)
        return {key: tuple(queue) for key, queue in lanes.items()}

    @cached_property
    def shared_buffers(self) -> frozenset[tuple[int, str]]:
        """The buffers that other ranks read or write. They must be in symmetric memory."""
        return frozenset(
            region.key
            for task in self.tasks
            for region in (*task.reads(), *task.writes())
            if region.rank != task.rank
        )

    @cached_property
    def signals(self) -> dict[int, frozenset[tuple[int, str]]]:
        """For each task that another lane waits for, the (rank, lane) pairs that wait. Derived from
        dependencies, never written by hand."""
        waiting: dict[int, set[tuple[int, str]]] = {}
        for task in self.tasks:
            for before in task.after:
                source = self.tasks[before]
                if (source.rank, source.lane) != (task.rank, task.lane):
                    waiting.setdefault(before, set()).add((task.rank, task.lane))
        return {task: frozenset(lanes) for task, lanes in waiting.items()}

    def num_bytes(self, region: Region) -> int:
        return region.num_elements * ITEM_BYTES[self.buffer[region.key].dtype]

    def bytes_by_engine(self, rank: int) -> dict[str, int]:
        """The bytes that cross a link for the rank, by engine."""
        moved: dict[str, int] = {}
        for task in self.tasks:
            if task.rank != rank:
                continue
            if isinstance(task, Copy):
                pairs = zip(task.reads(), task.writes(), strict=True)
                remote = sum(self.num_bytes(s) for s, t in pairs if s.rank != t.rank)
                if remote:
                    moved[task.engine] = moved.get(task.engine, 0) + remote
            else:
                used = (*task.reads(), *task.writes())
                remote = sum(self.num_bytes(r) for r in used if r.rank != rank)
                if remote:
                    moved["direct"] = moved.get("direct", 0) + remote
        return moved
