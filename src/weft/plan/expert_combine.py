"""Lowers the products of experts, which then go back to the ranks of their tokens
(`plan.experts`)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

from weft.errors import InvalidPlan
from weft.operation import result_dtype
from weft.plan.blocks import Block, cut_blocks, depth_of
from weft.plan.builder import Builder, refuse_impossible
from weft.plan.contents import Contents, Product, covers_once
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
from weft.plan.order import slices
from weft.plan.tasks import Plan, Region
from weft.schedule import Schedule


class Combined(Grouped, Protocol):
    """Experts multiply rows, and the products go to the ranks of their tokens
    (`MatmulAllToAll`)."""

    @property
    def tokens(self) -> tuple[tuple[int, ...], ...]:
        """Per rank, the rows that it gets from each (rank, expert)."""
        ...

    @property
    def n(self) -> int: ...

    @property
    def inner(self) -> tuple[int, ...]: ...


@lru_cache(maxsize=64)
def lower(op: Combined, schedule: Schedule) -> Plan:
    """The plan of all ranks for experts that multiply, and an exchange of their products."""
    refuse_impossible(schedule, refuses(schedule))
    builder, pieces = Builder(op, schedule), pieces_of(op.tokens, op.experts)
    ranks = [_Combine(builder, op, pieces, rank) for rank in range(op.world)]
    for rank in ranks:
        rank.make()
    for rank in ranks:
        rank.complete(ranks)
    return builder.plan()


class _Made(NamedTuple):
    """A chunk of the product: its region, and the task that makes it."""

    piece: ExpertPiece
    block: Block
    region: Region
    task: int | None


class _Combine:
    """Lowers the tasks of one rank. A piece's `source` is the rank of its tokens."""

    def __init__(self, builder: Builder, op: Combined, pieces: Pieces, rank: int) -> None:
        self.builder, self.op, self.pieces, self.rank = builder, op, pieces, rank
        self.schedule, add, world = builder.schedule, builder.add_buffer, op.world
        self.direct = self.schedule.engine == "direct"
        made, result = pieces.received[rank], result_dtype(op)
        self.x = add("x", rank, made, op.inner[rank], "input")
        self.w = [
            add(weight_name(0, e), rank, op.inner[rank], op.n, "input") for e in range(op.experts)
        ]
        self.y = add("y", rank, pieces.tokens[rank], op.n, "output", result)
        if world > 1:
            name, rows = ("inbox", pieces.tokens[rank]) if self.direct else ("partial", made)
            add(name, rank, rows, op.n, "workspace", result)
        after = [(rank + step) % world for step in range(1, world)]
        self.owners, self.makers = after, after[::-1]
        self.made: dict[int, list[_Made]] = {owner: [] for owner in range(world)}
        self._pulled: int | None = None

    def make(self) -> None:
        """Computes the products for the peers and, at the end, for this rank."""
        if self.schedule.serial and self.op.world > 1:
            for expert, (row, rows) in enumerate(self.pieces.spans[self.rank]):
                region = Region(self.rank, "partial", row, rows, 0, self.op.n)
                task = self._matmul(row, rows, expert, 0, self.op.n, region, f"expert {expert}")
                for owner in range(self.op.world):
                    piece = self.pieces.of[owner, self.rank, expert]
                    if piece.rows:
                        part = self._at("partial", self.rank, piece.expert_row, piece)
                        self.made[owner].append(_Made(piece, self._whole(piece), part, task))
            return
        own = [(piece, self._whole(piece)) for piece in self._for(self.rank)]
        cuts = [self._cut(owner) for owner in self.owners]
        uniform = self.schedule.start != "local" and self.op.world > 1
        for piece, block in turns([*cuts, own] if uniform else cuts, self.schedule):
            self._chunk(piece, block)
        for piece, block in () if uniform else own:
            self._chunk(piece, block)

    def _for(self, owner: int) -> list[ExpertPiece]:
        return [piece for piece in self.pieces.between(owner, self.rank) if piece.rows]

    def _whole(self, piece: ExpertPiece) -> Block:
        return 0, piece.rows, 0, self.op.n

    def _cut(self, owner: int) -> list[Chunk]:
        n, adaptive = self.op.n, self.schedule.fusion == "adaptive"
        by_default = depth_of(self.pieces.largest, n)
        depth = depth_per_piece(self.schedule, by_default, self.op.world, self.op.experts)
        chunks: list[Chunk] = []
        for piece in self._for(owner):
            if adaptive:
                chunks += [(piece, block) for block in cut_blocks(piece.rows, n, depth)]
            else:
                chunks += [(piece, (*part, 0, n)) for part in slices(piece.rows, depth)]
        return chunks

    def _chunk(self, piece: ExpertPiece, block: Block) -> None:
        """One GEMM over a chunk, written where its owner finds it."""
        row, rows, column, columns = block
        owner, at = piece.source, piece.token + row
        if owner == self.rank:
            region = Region(owner, "y", at, rows, column, columns)
        elif self.direct:
            region = Region(owner, "inbox", at, rows, column, columns)
        else:
            region = Region(self.rank, "partial", piece.expert_row + row, rows, column, columns)
        label = f"y{owner}.e{piece.expert}[{row}:{row + rows}]"
        first = piece.expert_row + row
        task = self._matmul(first, rows, piece.expert, column, columns, region, label)
        self.made[owner].append(_Made(piece, block, region, task))

    def _matmul(
        self,
        row: int,
        rows: int,
        expert: int,
        column: int,
        columns: int,
        c: Region,
        label: str,
    ) -> int | None:
        w = self.w[expert]
        b = Region(self.rank, w.name, 0, w.rows, column, columns)
        return self.builder.matmul(self.rank, self.x.rows_of(row, rows), b, c, label=label)

    def _at(self, buffer: str, rank: int, row: int, piece: ExpertPiece) -> Region:
        return Region(rank, buffer, row, piece.rows, 0, self.op.n)

    def complete(self, ranks: Sequence[_Combine]) -> None:
        """Brings what is not in y yet: products of peers, and with serial this rank's own."""
        made = [ranks[maker].made[self.rank] for maker in self.makers]
        chunks = [[(one.piece, one.block) for one in some] for some in made]
        found = {(one.piece, one.block): one for some in made for one in some}
        for chunk in turns(chunks, self.schedule):
            self._bring(found[chunk])
        for one in self.made[self.rank]:
            if one.region.buffer != "y":
                self._bring(one)

    def _bring(self, made: _Made) -> None:
        row, rows, column, columns = made.block
        piece = made.piece
        target = Region(self.rank, "y", piece.token + row, rows, column, columns)
        label = f"y{self.rank}.e{piece.expert} of {piece.target} [{row}:{row + rows}]"
        if made.region.rank == self.rank:
            move = [(made.region, target)]
            self.builder.permute(self.rank, move, after=[made.task], label=f"keep {label}")
            return
        chained = self._pulled if self.schedule.pattern == "peer" else None
        task = self.builder.copy(
            self.rank,
            made.region,
            target,
            peer=piece.target,
            after=[made.task, chained],
            label=label,
        )
        self._pulled = task if task is not None else self._pulled


def check(op: Combined, contents: Contents) -> None:
    """Raises unless every row of y holds the product of its expert, each term exactly once."""
    pieces = pieces_of(op.tokens, op.experts)
    for rank in range(op.world):
        own = [p for maker in range(op.world) for p in pieces.between(rank, maker) if p.rows]
        first = [piece.token for piece in own]
        boxes: dict[ExpertPiece, list[tuple[int, int, int, int, int, int]]] = {p: [] for p in own}
        for held in contents.of(rank, "y"):
            value = held.value
            piece = own[bisect_right(first, held.row) - 1]
            inside = held.row + held.rows <= piece.token + piece.rows
            if not inside or not isinstance(value, Product):
                raise InvalidPlan(f"y@{rank} holds {value} where a product belongs")
            maker, at = piece.target, held.row - piece.token
            empty = op.inner[maker] == 0
            right = (
                value.b == (maker, weight_name(0, piece.expert))
                and value.column == held.column
                and ((value.a, value.row) == ((maker, "x"), piece.expert_row + at) or empty)
            )
            if not right:
                raise InvalidPlan(f"y@{rank}: {value} is in the wrong place")
            k = (0, 1) if empty else (value.k, value.size)
            boxes[piece].append((at, held.rows, held.column, held.columns, *k))
        for piece, some in boxes.items():
            size = (piece.rows, op.n, max(op.inner[piece.target], 1))
            covers_once(some, size, f"y@{rank} from expert {piece.expert} of rank {piece.target}")
