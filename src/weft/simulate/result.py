"""The result of a simulation: when every piece ran. A Timeline is made from it on request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from weft.machine import Machine
from weft.plan.adaptive import merged
from weft.plan.tasks import AnyTask, Matmul, Plan
from weft.simulate.demand import num_flops
from weft.timeline import COMPUTE, Span, Timeline


@dataclass(frozen=True, slots=True)
class Piece:
    """A task, or several merged into one, from `start` to `end`. Its body began at `body`.

    `local`: the time of the body alone on the machine, with local operands. `alone`: the same, with
    remote operands read over idle links.
    """

    run: tuple[AnyTask, ...]
    task: AnyTask
    start: float
    body: float
    end: float
    local: float
    alone: float

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def launch(self) -> float:
        """The fixed part: command, launch, gap after the last kernel, adaptive decision."""
        return self.body - self.start


@dataclass(frozen=True)
class Simulation:
    """The pieces of all ranks, or only of rank 0 if it represents all of them."""

    plan: Plan
    machine: Machine
    pieces: tuple[Piece, ...]
    folded: bool

    @cached_property
    def seconds(self) -> float:
        """The time from the call to the end of the last task of any rank."""
        return max((piece.end for piece in self.pieces), default=0.0)

    @property
    def last_rank(self) -> int:
        """The rank that ends last."""
        last = max(self.pieces, key=lambda piece: (piece.end, -piece.task.rank), default=None)
        return 0 if last is None else last.task.rank

    def compute_pieces(self, rank: int) -> list[Piece]:
        """The pieces on the compute lane of a simulated rank, in order."""
        return [p for p in self.pieces if p.task.rank == rank and p.task.lane == COMPUTE]

    def timeline(self, rank: int | None = None) -> Timeline:
        """The spans of one rank, or of all. A span covers the fixed part and the body of its task.
        The time until a task on another lane knows an end is a gap between spans."""
        spans = sorted(self._spans(rank), key=lambda span: (span.rank, span.lane, span.start))
        title = f"{self.plan.schedule} on {self.machine.title}, simulated"
        return Timeline(tuple(spans), title)

    def _spans(self, rank: int | None) -> Iterator[Span]:
        if not self.folded:
            for piece in self.pieces:
                if rank is None or piece.task.rank == rank:
                    yield self._span(piece, piece.task)
            return
        ranks: list[list[AnyTask]] = [[] for _ in range(self.plan.operation.world)]
        place: dict[int, int] = {}
        for task in self.plan.tasks:
            place[task.id] = len(ranks[task.rank])
            ranks[task.rank].append(task)
        for piece in self.pieces:
            places = [place[task.id] for task in piece.run]
            for tasks in ranks if rank is None else ranks[rank : rank + 1]:
                run = [tasks[index] for index in places]
                matmuls = [task for task in run if isinstance(task, Matmul)]
                yield self._span(piece, merged(matmuls) if len(matmuls) > 1 else run[0])

    def _span(self, piece: Piece, task: AnyTask) -> Span:
        flops = num_flops(task)
        moved = 0 if isinstance(task, Matmul) else sum(map(self.plan.num_bytes, task.reads()))
        when = (piece.start, piece.end)
        return Span(task.rank, task.lane, task.label, task.kind, *when, moved, flops)
