"""Lowers an exchange of rows to the ranks of their experts, which multiply them
(`plan.experts`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from weft.errors import InvalidPlan
from weft.operation import result_dtype
from weft.plan.blocks import Block
from weft.plan.builder import Builder, refuse_impossible
from weft.plan.contents import Contents, Data, Held, Product, covers_once
from weft.plan.experts import (
    Chunk,
    ExpertPiece,
    Grouped,
    Pieces,
    depth_per_piece,
    pieces_of,
    refuses,
    turns,
    weight_name,
)
from weft.plan.gathering import adaptive_depth
from weft.plan.order import slices
from weft.plan.tasks import Buffer, Plan, Region
from weft.schedule import Schedule


class Dispatched(Grouped, Protocol):
    """Rows go to experts, which multiply them (`AllToAllMatmul`)."""

    @property
    def k(self) -> int: ...

    @property
    def columns(self) -> tuple[tuple[int, ...], ...]: ...

    @property
    def gathered(self) -> bool: ...


@lru_cache(maxsize=64)
def lower(op: Dispatched, schedule: Schedule) -> Plan:
    """The plan of all ranks for an exchange to experts that then multiply."""
    refuse_impossible(schedule, refuses(schedule))
    builder, pieces = Builder(op, schedule), pieces_of(op.splits, op.experts)
    for rank in range(op.world):
        _Dispatch(builder, op, pieces, rank).lower()
    return builder.plan()


class _Dispatch:
    """Lowers the tasks of one rank."""

    def __init__(self, builder: Builder, op: Dispatched, pieces: Pieces, rank: int) -> None:
        self.builder, self.op, self.pieces, self.rank = builder, op, pieces, rank
        self.schedule, add = builder.schedule, builder.add_buffer
        self.m = pieces.received[rank]
        self.x = add("x", rank, pieces.tokens[rank], op.k, "input")
        self.w = [
            [add(weight_name(i, e), rank, op.k, n, "input") for e in range(op.experts)]
            for i, n in enumerate(op.columns[rank])
        ]
        result = result_dtype(op)
        self.y = [
            add(f"y{i}", rank, self.m, n, "output", result) for i, n in enumerate(op.columns[rank])
        ]
        self._gathered = add("gathered", rank, self.m, op.k, "output") if op.gathered else None
        self._pulled: int | None = None

    @property
    def gathered(self) -> Buffer:
        if self._gathered is None:
            add = self.builder.add_buffer
            self._gathered = add("gathered", self.rank, self.m, self.op.k, "workspace")
        return self._gathered

    def lower(self) -> None:
        rank, world = self.rank, self.op.world
        peers = [(rank + step) % world for step in range(1, world)]
        if self.schedule.serial and (world > 1 or self.op.gathered):
            # An engine pulls in order, so its last pull is the one to wait for.
            pulls = [self._pull_all(source) for source in [*peers, rank]]
            for expert, (row, rows) in enumerate(self.pieces.spans[rank]):
                region = self.gathered.rows_of(row, rows)
                self._multiply(region, row, expert, pulls, f"expert {expert}")
            return
        if self.op.gathered:
            for piece in self._from(rank):
                self._pull(piece, 0, piece.rows)
        own = [(piece, (0, piece.rows, 0, 0)) for piece in self._from(rank)]
        hetero = self.schedule.start == "local" or world == 1
        if hetero:
            for piece, block in own:
                self._chunk(piece, block)
        cuts = [self._cut(source) for source in peers]
        for piece, block in turns(cuts if hetero else [own, *cuts], self.schedule):
            self._chunk(piece, block)

    def _pull_all(self, source: int) -> int | None:
        pulls = [self._pull(piece, 0, piece.rows) for piece in self._from(source)]
        return max((task for task in pulls if task is not None), default=None)

    def _from(self, source: int) -> list[ExpertPiece]:
        return self.pieces.between(source, self.rank)

    def _cut(self, source: int) -> list[Chunk]:
        world, experts = self.op.world, self.op.experts
        adaptive = adaptive_depth(world, self.pieces.largest)
        depth = depth_per_piece(self.schedule, adaptive, world, experts)
        return [
            (piece, (row, rows, 0, 0))
            for piece in self._from(source)
            for row, rows in slices(piece.rows, depth)
            if rows
        ]

    def _chunk(self, piece: ExpertPiece, block: Block) -> None:
        row, rows = block[:2]
        remote, direct = piece.source != self.rank, self.schedule.engine == "direct"
        pull = None
        if remote and (not direct or self.op.gathered):
            pull = self._pull(piece, row, rows)
        there = piece.expert_row + row
        if remote and not direct:
            a = self.gathered.rows_of(there, rows)
        else:
            a = Region(piece.source, "x", piece.token + row, rows, 0, self.op.k)
            pull = None
        label = f"x{piece.source}.e{piece.expert}[{row}:{row + rows}]"
        loose = self.schedule.fusion == "adaptive" and remote
        self._multiply(a, there, piece.expert, [pull], label, loose)

    def _multiply(
        self,
        a: Region,
        row: int,
        expert: int,
        after: Sequence[int | None],
        label: str,
        loose: bool = False,
    ) -> None:
        for i, (weights, y) in enumerate(zip(self.w, self.y, strict=True)):
            self.builder.matmul(
                self.rank,
                a,
                weights[expert].all(),
                y.rows_of(row, a.rows),
                merge=i * self.op.experts + expert if loose else None,
                after=after,
                label=label if len(self.w) == 1 else f"{label} w{i}",
            )

    def _pull(self, piece: ExpertPiece, row: int, rows: int) -> int | None:
        one_at_a_time = self.schedule.pattern == "peer" and piece.source != self.rank
        task = self.builder.copy(
            self.rank,
            Region(piece.source, "x", piece.token + row, rows, 0, self.op.k),
            self.gathered.rows_of(piece.expert_row + row, rows),
            peer=piece.source,
            after=[self._pulled] if one_at_a_time else [],
            label=f"x{piece.source}.e{piece.expert}[{row}:{row + rows}]",
        )
        if one_at_a_time and task is not None:
            self._pulled = task
        return task


def check(op: Dispatched, contents: Contents) -> None:
    """Raises unless every output holds what the operation defines, each term exactly once."""
    pieces = pieces_of(op.splits, op.experts)
    for rank in range(op.world):
        for index, n in enumerate(op.columns[rank]):
            boxes, name = [], f"y{index}"
            for held in contents.of(rank, name):
                _check_product(op, pieces, rank, index, held)
                # An empty sum has no terms, but its zeros must be written exactly once.
                k = (held.value.k, held.value.size) if op.k else (0, 1)  # type: ignore[union-attr]
                boxes.append((held.row, held.rows, held.column, held.columns, *k))
            covers_once(boxes, (pieces.received[rank], n, max(op.k, 1)), f"{name}@{rank}")
        if op.gathered:
            boxes = []
            for held in contents.of(rank, "gathered"):
                value, piece = held.value, pieces.at(rank, held.row, held.rows)
                right = (
                    isinstance(value, Data)
                    and piece is not None
                    and _is_row(piece, value.buffer, value.row, held.row)
                    and value.column == held.column
                )
                if not right:
                    raise InvalidPlan(f"gathered@{rank}: {value} is in the wrong place")
                boxes.append((held.row, held.rows, held.column, held.columns, 0, 1))
            covers_once(boxes, (pieces.received[rank], op.k, 1), f"gathered@{rank}")


def _check_product(op: Dispatched, pieces: Pieces, rank: int, index: int, held: Held) -> None:
    """Raises unless a rectangle of a result is the product of its rows with their expert's W."""
    value, right = held.value, False
    if isinstance(value, Product) and value.column == held.column:
        piece = pieces.at(rank, held.row, held.rows)
        if op.k == 0:  # an empty sum may cover the rows of several pieces
            experts = [
                expert
                for expert, (row, rows) in enumerate(pieces.spans[rank])
                if row <= held.row and held.row + held.rows <= row + rows
            ]
        else:
            own = piece is not None and _is_row(piece, value.a, value.row, held.row)
            experts = [piece.expert] if own and piece is not None else []
        right = value.b in [(rank, weight_name(index, expert)) for expert in experts]
    if not right:
        raise InvalidPlan(f"y{index}@{rank}: {value} is in the wrong place")


def _is_row(piece: ExpertPiece, buffer: tuple[int, str], row: int, place: int) -> bool:
    """Whether a row of x belongs to this place on the side of experts."""
    return buffer == (piece.source, "x") and row - piece.token == place - piece.expert_row
