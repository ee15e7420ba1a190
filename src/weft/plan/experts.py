"""Exchanges by rank and expert: rows travel to the ranks of their experts and back, with a product
on the side of the experts.

A rank has several experts, each with its own weights. A *piece* is what one rank has for one expert
of another rank. On the side of tokens, pieces are in the order of (rank, expert), as tokens sorted
by expert are. On the side of experts they are in the order of (expert, rank), so that all rows of
an expert are next to each other and need one GEMM:

    tokens of rank 0   | rank 0: e0 e1 | rank 1: e0 e1 |        dispatch    rows of rank 0
    tokens of rank 1   | rank 0: e0 e1 | rank 1: e0 e1 |           ->       | e0: 0 1 | e1: 0 1 |

Chunks never cross the border of a piece. A chunk is multiplied when it has arrived, and sent when
it is made. Adaptive joins chunks of the same expert that are there, also those of different ranks:

    serial             engine | 1.e0          1.e1          |
                       compute                              | e0 (0 1)      | e1 (0 1)      |
    adaptive           engine | 1.e0.0 1.e0.1 1.e1.0 1.e1.1 |
                       compute| 0.e0   | 0.e1 | 1.e0.0 1.e0.1 | 1.e1.0 1.e1.1 |
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol

from weft.operation import starts
from weft.plan.blocks import Block
from weft.plan.tasks import Plannable
from weft.schedule import Schedule

MOST_CHUNKS = 8
"""The most chunks per rank of `adaptive` without a depth. A router gives other sizes in every call,
so plans are made anew, and their cost grows with the number of tasks."""


def refuses(schedule: Schedule) -> str | None:
    """The reason why an exchange with several experts cannot have a schedule, or None."""
    if schedule.serial:
        return None
    if schedule.fusion == "fused":
        return "chunks of different experts have different weights, so no GEMM can cover a step"
    if schedule.fusion == "kernel":
        return "the kernel that stores into peers has one weight; use adaptive"
    if schedule.cut == "columns":
        return "with several experts, chunks are rows of one expert"
    return None


class ExpertPiece(NamedTuple):
    """The rows that a rank has for an expert of another. token: their first row on the side of
    tokens. expert_row: on the side of experts."""

    source: int
    target: int
    expert: int
    token: int
    expert_row: int
    rows: int


class Pieces:
    """The pieces of an exchange. splits: per rank, its rows for each (rank, expert)."""

    def __init__(self, splits: tuple[tuple[int, ...], ...], experts: int) -> None:
        world = self.world = len(splits)
        self.experts = experts
        self.tokens = [sum(sizes) for sizes in splits]
        """The rows of each rank on the side of tokens."""
        first = [starts(sizes) for sizes in splits]
        self.of: dict[tuple[int, int, int], ExpertPiece] = {}
        """By source, target and expert."""
        self.received: list[int] = []
        """The rows of each rank on the side of experts."""
        self.spans: list[list[tuple[int, int]]] = []
        """Per rank, the (first row, rows) of each of its experts."""
        for target in range(world):
            row, spans = 0, []
            for expert in range(experts):
                begin = row
                for source in range(world):
                    at = target * experts + expert
                    rows = splits[source][at]
                    piece = ExpertPiece(source, target, expert, first[source][at], row, rows)
                    self.of[source, target, expert] = piece
                    row += rows
                spans.append((begin, row - begin))
            self.received.append(row)
            self.spans.append(spans)

    def at(self, target: int, row: int, rows: int) -> ExpertPiece | None:
        """The piece that has these rows on a rank's side of experts."""
        begins, pieces = self._by_row[target]
        place = bisect_right(begins, row) - 1
        if place >= 0 and row + rows <= pieces[place].expert_row + pieces[place].rows:
            return pieces[place]
        return None

    @cached_property
    def _by_row(self) -> list[tuple[list[int], list[ExpertPiece]]]:
        """Per rank, the pieces that have rows, and their first rows, on the side of experts."""
        found = []
        for rank in range(self.world):
            mine = [p for p in self.of.values() if p.target == rank and p.rows]
            mine.sort(key=lambda piece: piece.expert_row)
            found.append(([piece.expert_row for piece in mine], mine))
        return found

    def between(self, source: int, target: int) -> list[ExpertPiece]:
        return [self.of[source, target, expert] for expert in range(self.experts)]

    @cached_property
    def largest(self) -> int:
        """The most rows from one rank to another."""
        pairs = ((s, t) for s in range(self.world) for t in range(self.world))
        return max(sum(p.rows for p in self.between(*pair)) for pair in pairs)


@lru_cache(maxsize=256)
def pieces_of(splits: tuple[tuple[int, ...], ...], experts: int) -> Pieces:
    return Pieces(splits, experts)


class Grouped(Plannable, Protocol):
    """An exchange with a product on the side of experts."""

    @property
    def splits(self) -> tuple[tuple[int, ...], ...]: ...

    @property
    def experts(self) -> int: ...


def weight_name(index: int, expert: int) -> str:
    """The buffer of an expert's part of the weight W_index."""
    return f"w{index}.{expert}"


def depth_per_piece(schedule: Schedule, adaptive: int, world: int, experts: int) -> int:
    """The number of chunks per piece, so that all pieces of a rank have as many as the schedule
    states, or by default `world`, or `adaptive` up to a limit."""
    depth = schedule.depth
    if depth is None:
        depth = min(adaptive, MOST_CHUNKS) if schedule.fusion == "adaptive" else world
        if schedule.fusion == "adaptive" and schedule.engine == "direct":
            depth = 1
    return max(1, -(-depth // experts))


def turns(cuts: Sequence[list[tuple[ExpertPiece, Block]]], schedule: Schedule) -> Iterator[Chunk]:
    """The chunks of several ranks in the order in which they are handled: one rank after the other,
    or one chunk of every rank in turn."""
    if schedule.pattern == "peer":
        yield from (chunk for cut in cuts for chunk in cut)
        return
    for number in range(max(map(len, cuts), default=0)):
        yield from (cut[number] for cut in cuts if number < len(cut))


Chunk = tuple[ExpertPiece, Block]
"""A piece, and a block of its rows and columns."""
