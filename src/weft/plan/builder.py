"""Collects the buffers and tasks of a plan during lowering."""

from __future__ import annotations

from collections.abc import Iterable

from weft.errors import Unsupported
from weft.plan.tasks import (
    AnyTask,
    Await,
    Buffer,
    BufferKind,
    Copy,
    KernelTiles,
    Lookup,
    Matmul,
    Part,
    Permute,
    Plan,
    Plannable,
    Reduce,
    Region,
)
from weft.schedule import Engine, Schedule


def refuse_impossible(
    schedule: Schedule, reason: str | None = None, *, in_kernel: bool = False
) -> None:
    """Raises `Unsupported` unless the schedule can be planned.

    reason: why this operation cannot have the schedule. in_kernel: whether the operation can
    communicate from inside its kernel.
    """
    if schedule.fusion == "kernel" and not in_kernel:
        reason = reason or "this operation cannot communicate from inside its kernel; use adaptive"
    reason = schedule.impossible() or reason
    if reason is not None:
        raise Unsupported(f"{schedule} cannot be planned: {reason}")


class Builder:
    """Numbers tasks in the order in which they are added. An empty region makes no task, so that
    lowerings need no special cases for empty sizes."""

    def __init__(self, operation: Plannable, schedule: Schedule) -> None:
        self.operation = operation
        self.schedule = schedule
        self.buffers: list[Buffer] = []
        self.tasks: list[AnyTask] = []

    def add_buffer(
        self,
        name: str,
        rank: int,
        rows: int,
        columns: int,
        kind: BufferKind,
        dtype: str | None = None,
    ) -> Buffer:
        buffer = Buffer(name, rank, rows, columns, kind, dtype or self.operation.dtype)
        self.buffers.append(buffer)
        return buffer

    def copy(
        self,
        rank: int,
        source: Region,
        target: Region,
        *,
        peer: int,
        also: Iterable[Region] = (),
        swaps: bool = False,
        prelaunched: bool = True,
        after: Iterable[int | None] = (),
        label: str,
    ) -> int | None:
        if source.num_elements == 0:
            return None
        # With `direct`, the GEMM reads peers in place. Copies that remain use a copy engine.
        engine: Engine = "dma" if self.schedule.engine == "direct" else self.schedule.engine
        more = (tuple(also), swaps, prelaunched)
        return self._add(
            Copy(self._id, rank, _ids(after), label, source, target, engine, peer, *more)
        )

    def matmul(
        self,
        rank: int,
        a: Region,
        b: Region,
        c: Region,
        *,
        accumulate: bool = False,
        merge: int | None = None,
        transposed: bool = False,
        after: Iterable[int | None] = (),
        label: str,
    ) -> int | None:
        if c.num_elements == 0:
            return None
        return self._add(
            Matmul(self._id, rank, _ids(after), label, a, b, c, accumulate, merge, transposed)
        )

    def permute(
        self,
        rank: int,
        moves: Iterable[tuple[Region, Region]],
        *,
        after: Iterable[int | None] = (),
        label: str,
    ) -> int | None:
        kept = [move for move in moves if move[0].num_elements]
        if not kept:
            return None
        sources, targets = zip(*kept, strict=True)
        return self._add(Permute(self._id, rank, _ids(after), label, sources, targets))

    def reduce(
        self,
        rank: int,
        sources: Iterable[Region],
        targets: Iterable[Region],
        *,
        early: bool = False,
        after: Iterable[int | None] = (),
        label: str,
    ) -> int | None:
        into = tuple(targets)
        if into[0].num_elements == 0:
            return None
        return self._add(Reduce(self._id, rank, _ids(after), label, tuple(sources), into, early))

    def tiles(
        self, rank: int, parts: Iterable[Part], *, after: Iterable[int | None] = (), label: str
    ) -> int | None:
        kept = tuple(part for part in parts if part.c.num_elements)
        if not kept:
            return None
        return self._add(KernelTiles(self._id, rank, _ids(after), label, kept))

    def lookup(
        self,
        rank: int,
        moves: Iterable[tuple[Region, Region]],
        pooling: int,
        *,
        label: str,
    ) -> int | None:
        kept = [move for move in moves if move[0].num_elements]
        if not kept:
            return None
        sources, targets = zip(*kept, strict=True)
        return self._add(Lookup(self._id, rank, (), label, sources, targets, pooling))

    def wait(self, rank: int, after: Iterable[int | None], *, label: str) -> int | None:
        tasks = _ids(after)
        return self._add(Await(self._id, rank, tasks, label)) if tasks else None

    def plan(self, *, one_launch: bool = False) -> Plan:
        workspace = [0] * self.operation.world
        for buffer in self.buffers:
            if buffer.kind == "workspace":
                workspace[buffer.rank] += buffer.num_bytes
        return Plan(
            self.operation,
            self.schedule,
            tuple(self.buffers),
            tuple(self.tasks),
            tuple(workspace),
            one_launch,
        )

    @property
    def _id(self) -> int:
        return len(self.tasks)

    def _add(self, task: AnyTask) -> int:
        self.tasks.append(task)
        return task.id


def _ids(after: Iterable[int | None]) -> tuple[int, ...]:
    if after == ():
        return ()
    return tuple(sorted({task for task in after if task is not None}))
