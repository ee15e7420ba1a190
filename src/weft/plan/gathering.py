"""Lowers operations that gather and then multiply: Y_i = (rows of every rank's X) @ W_i.

The operation states which rows of each rank's X a rank gathers (`spans`): all rows for an
all-gather, its share of each X for an all-to-all. Every rank pulls the chunks of its peers with
its own engines, one engine per peer. For 2 ranks and 4 chunks per shard, where x1 is the shard of
the other rank:

    serial             engine | x1                     |
                       compute                         | x0 x1                  |
    hetero-unfused-1d  engine | x1.0  x1.1  x1.2  x1.3 |
                       compute| x0          |x1.0|x1.1 |x1.2|x1.3|
    adaptive           engine | x1.0  x1.1  x1.2  x1.3 |
                       compute| x0          |x1.0 x1.1 |x1.2 x1.3|
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from weft.dtype import NARROW, accumulator
from weft.operation import result_dtype, split, starts
from weft.plan.builder import Builder, refuse_impossible
from weft.plan.order import slices
from weft.plan.tasks import Buffer, Plan, Plannable, Region
from weft.schedule import Schedule


class Gathering(Plannable, Protocol):
    """An operation that gathers rows of x and multiplies them with every w of the rank."""

    @property
    def k(self) -> int: ...

    @property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """Per rank, the columns of each of its W_i."""
        ...

    @property
    def gathered(self) -> bool:
        """Whether the gathered rows are an output, too."""
        ...

    def x_rows(self, rank: int) -> int:
        """The rows of x on a rank."""
        ...

    def spans(self, rank: int) -> Sequence[tuple[int, int]]:
        """The (first row, rows) that the rank gathers from each rank's x, in the order of ranks."""
        ...


def default_depth(operation: Gathering, schedule: Schedule) -> int:
    """The number of chunks per shard if the schedule does not state it.

    A fixed schedule uses `world`, as FiCCO does. Adaptive runs a separate GEMM for a chunk only
    when compute would otherwise be idle. So it uses more chunks, which shortens the GEMM of the
    last chunk, the only one that nothing can hide. With `direct`, a shard can be read as soon as
    its rank has entered the call, so chunks gain nothing.
    """
    if schedule.fusion != "adaptive":
        return operation.world
    if schedule.engine == "direct":
        return 1
    most = max(rows for rank in range(operation.world) for _, rows in operation.spans(rank))
    return adaptive_depth(operation.world, most)


def adaptive_depth(world: int, most: int) -> int:
    """The number of chunks per shard under adaptive. most: the rows of the largest shard."""
    return max(world, min(32, most // 16))


@lru_cache(maxsize=64)
def lower(operation: Gathering, schedule: Schedule) -> Plan:
    """The plan of all ranks; raises `Unsupported` with the reason if the schedule is impossible."""
    refuse_impossible(schedule)
    depth = schedule.depth
    if depth is None:
        depth = default_depth(operation, schedule)
    builder = Builder(operation, schedule)
    ranks = [
        _GatherRank(builder, operation, rank, max(depth, 1)) for rank in range(operation.world)
    ]
    for rank in ranks:
        if operation.world == 1 or schedule.serial:
            rank.serial()
        elif schedule.cut == "columns":
            rank.columns()
        elif schedule.fusion == "fused":
            rank.fused_rows()
        else:
            rank.unfused_rows()
    return builder.plan()


class _GatherRank:
    """Lowers the tasks of one rank: its buffers, copies and matmuls."""

    def __init__(self, builder: Builder, op: Gathering, rank: int, depth: int) -> None:
        self.builder = builder
        self.op = op
        self.rank = rank
        self.depth = depth
        self.hetero = builder.schedule.start == "local"
        self.peers = [(rank + step) % op.world for step in range(1, op.world)]
        self.sources = self.peers if self.hetero else [rank, *self.peers]
        spans = op.spans(rank)
        self.first = [first for first, _ in spans]
        self.rows = [rows for _, rows in spans]
        self.offsets = starts(self.rows)
        self.m = sum(self.rows)
        add = builder.add_buffer
        x = add("x", rank, op.x_rows(rank), op.k, "input")
        self.own = x.rows_of(self.first[rank], self.rows[rank])
        self.w = [add(f"w{i}", rank, op.k, n, "input") for i, n in enumerate(op.columns[rank])]
        self.result = result_dtype(op)
        self.y = [
            add(f"y{i}", rank, self.m, n, "output", self.result)
            for i, n in enumerate(op.columns[rank])
        ]
        self._gathered = add("gathered", rank, self.m, op.k, "output") if op.gathered else None
        self._pulled: int | None = None

    @property
    def gathered(self) -> Buffer:
        """The gathered X in the order of ranks: an output if requested, otherwise workspace."""
        if self._gathered is None:
            self._gathered = self.builder.add_buffer(
                "gathered", self.rank, self.m, self.op.k, "workspace"
            )
        return self._gathered

    def serial(self) -> None:
        """Gathers everything, then runs one GEMM."""
        if self.op.world == 1 and not self.op.gathered:
            self._matmul(self.own, 0)
            return
        pulls = [self._pull(s, 0, self.rows[s]) for s in [*self.peers, self.rank]]
        self._matmul(self.gathered.all(), 0, after=pulls)

    def unfused_rows(self) -> None:
        """One GEMM per chunk. Under adaptive, one GEMM may cover adjacent chunks that are there."""
        direct = self.builder.schedule.engine == "direct"
        adaptive = self.builder.schedule.fusion == "adaptive"
        if self.op.gathered:
            self._pull(self.rank, 0, self.rows[self.rank])
        if self.hetero:
            self._matmul(self.own, self.offsets[self.rank], label="local shard")
        for source, row, rows in self._row_chunks():
            own_or_direct = direct or source == self.rank
            pull = None
            if source != self.rank and (not direct or self.op.gathered):
                pull = self._pull(source, row, rows)
            there = self.offsets[source] + row
            a = (
                self._chunk(source, row, rows)
                if own_or_direct
                else self.gathered.rows_of(there, rows)
            )
            self._matmul(
                a,
                there,
                after=[] if own_or_direct else [pull],
                merging=adaptive,
                label=f"x{source}[{row}:{row + rows}]",
            )

    def fused_rows(self) -> None:
        """One GEMM per step over the chunks of all sources, which are packed into one buffer. The
        rows of its result are then scattered to their places."""
        op, builder = self.op, self.builder
        if op.gathered:
            self._pull(self.rank, 0, self.rows[self.rank])
        if self.hetero:
            self._matmul(self.own, self.offsets[self.rank], label="local shard")
        steps = self._steps()
        in_place = [self._adjacent(step) for step in steps]
        widest = max(
            (sum(c[2] for c in s) for s, a in zip(steps, in_place, strict=True) if not a), default=0
        )
        packed = products = None
        if widest:
            total = sum(c[2] for s, a in zip(steps, in_place, strict=True) if not a for c in s)
            packed = builder.add_buffer("packed", self.rank, total, op.k, "workspace")
            products = [
                builder.add_buffer(
                    f"product{i}", self.rank, widest, y.columns, "workspace", y.dtype
                )
                for i, y in enumerate(self.y)
            ]
        base = 0
        for number, (step, adjacent) in enumerate(zip(steps, in_place, strict=True)):
            rows = sum(size for _, _, size in step)
            if packed is None or products is None or adjacent:
                pulls = [self._pull(*chunk) for chunk in step]
                there = self.offsets[step[0][0]] + step[0][1]
                a = self.gathered.rows_of(there, rows)
                self._matmul(a, there, after=pulls, label=f"step {number}")
                continue
            arrived = self._pack(step, packed, base, number)
            for i, (w, product, y) in enumerate(zip(self.w, products, self.y, strict=True)):
                result = product.rows_of(0, rows)
                multiplied = builder.matmul(
                    self.rank,
                    packed.rows_of(base, rows),
                    w.all(),
                    result,
                    after=arrived,
                    label=_name(f"step {number}", i, self.w),
                )
                builder.permute(
                    self.rank,
                    _scatter(product, y, [(self.offsets[s] + row, n) for s, row, n in step]),
                    after=[multiplied],
                    label=_name(f"scatter {number}", i, self.w),
                )
            base += rows

    def columns(self) -> None:
        """Chunks are blocks of K: every GEMM accumulates the terms of its block into y."""
        op = self.op
        first_row, own = self.offsets[self.rank], self.rows[self.rank]
        if op.gathered and self.hetero:
            self._pull(self.rank, 0, own)
        sums = self._sums()
        if self.hetero:
            self._matmul(self.own, first_row, label="local shard")
        if self.builder.schedule.fusion == "unfused":
            blocks = [(self.offsets[s], self.rows[s]) for s in self.sources]
        elif self.hetero:
            blocks = [(0, first_row), (first_row + own, self.m - first_row - own)]
        else:
            blocks = [(0, self.m)]
        for number, (column, columns) in enumerate(slices(op.k, self.depth)):
            pulls = {s: self._pull(s, 0, self.rows[s], column, columns) for s in self.sources}
            for row, rows in blocks:
                needed = [
                    pulls[s]
                    for s in self.sources
                    if row < self.offsets[s] + self.rows[s] and self.offsets[s] < row + rows
                ]
                a = Region(self.rank, "gathered", row, rows, column, columns)
                label = f"columns {column}:{column + columns}"
                self._matmul(a, row, into=sums, accumulate=number > 0, after=needed, label=label)
        if sums is not self.y:
            for i, (total, y) in enumerate(zip(sums, self.y, strict=True)):
                moves = [(total.rows_of(*block), y.rows_of(*block)) for block in blocks]
                self.builder.permute(self.rank, moves, label=_name("round", i, self.w))

    def _sums(self) -> list[Buffer]:
        """The buffers for sums over K: the outputs, or wider workspace if they are narrow."""
        if self.result not in NARROW:
            return self.y
        add, wide = self.builder.add_buffer, accumulator(self.result)
        return [
            add(f"sum{i}", self.rank, y.rows, y.columns, "workspace", wide)
            for i, y in enumerate(self.y)
        ]

    def _matmul(
        self,
        a: Region,
        row: int,
        *,
        into: list[Buffer] | None = None,
        accumulate: bool = False,
        merging: bool = False,
        after: Sequence[int | None] = (),
        label: str = "all",
    ) -> None:
        """Writes a @ W_i to the rows from `row` on, for every W_i."""
        for i, (w, y) in enumerate(zip(self.w, into or self.y, strict=True)):
            self.builder.matmul(
                self.rank,
                a,
                Region(self.rank, w.name, a.column, a.columns, 0, w.columns),
                y.rows_of(row, a.rows),
                accumulate=accumulate,
                merge=i if merging else None,
                after=after,
                label=_name(label, i, self.w),
            )

    def _pull(
        self, source: int, row: int, rows: int, column: int = 0, columns: int | None = None
    ) -> int | None:
        """Copies a chunk of a shard to its place in the gathered X."""
        columns = self.op.k if columns is None else columns
        there = Region(
            self.rank, self.gathered.name, self.offsets[source] + row, rows, column, columns
        )
        return self._copy(self._chunk(source, row, rows, column, columns), there)

    def _chunk(
        self, source: int, row: int, rows: int, column: int = 0, columns: int | None = None
    ) -> Region:
        """The region of a chunk before it is gathered."""
        columns = self.op.k if columns is None else columns
        return Region(source, "x", self.first[source] + row, rows, column, columns)

    def _copy(self, source: Region, target: Region) -> int | None:
        one_at_a_time = self.builder.schedule.pattern == "peer" and source.rank != self.rank
        row = source.row - self.first[source.rank]
        cut = f"{row}:{row + source.rows}"
        if source.columns < self.op.k:
            cut += f", {source.column}:{source.column + source.columns}"
        task = self.builder.copy(
            self.rank,
            source,
            target,
            peer=source.rank,
            after=[self._pulled] if one_at_a_time else [],
            label=f"x{source.rank}[{cut}]",
        )
        if one_at_a_time and task is not None:
            self._pulled = task
        return task

    def _pack(
        self, step: list[tuple[int, int, int]], packed: Buffer, base: int, number: int
    ) -> list[int | None]:
        """Packs the chunks of a step. Engines copy them into `packed` directly, unless the gathered
        X is an output, too: then compute packs them from it."""
        arrived: list[int | None] = []
        moves: list[tuple[Region, Region]] = []
        for source, row, rows in step:
            target = packed.rows_of(base, rows)
            base += rows
            if not self.op.gathered:
                arrived.append(self._copy(self._chunk(source, row, rows), target))
            elif source == self.rank:
                moves.append((self._chunk(source, row, rows), target))
            else:
                arrived.append(self._pull(source, row, rows))
                here = self.gathered.rows_of(self.offsets[source] + row, rows)
                moves.append((here, target))
        if not moves:
            return arrived
        return [self.builder.permute(self.rank, moves, after=arrived, label=f"gather {number}")]

    def _steps(self) -> list[list[tuple[int, int, int]]]:
        """(source, row, rows) of the chunks of every step, without empty chunks."""
        cuts = {source: split(self.rows[source], self.depth) for source in self.sources}
        reached = dict.fromkeys(self.sources, 0)
        steps = []
        for number in range(min(self.depth, max(self.rows))):
            step = []
            for source in self.sources:
                rows = cuts[source][number]
                if rows:
                    step.append((source, reached[source], rows))
                    reached[source] += rows
            if step:
                steps.append(step)
        return steps

    def _row_chunks(self) -> list[tuple[int, int, int]]:
        """All chunks in the order in which they are requested."""
        if self.builder.schedule.pattern == "peer":
            cut = {s: slices(self.rows[s], self.depth) for s in self.sources}
            return [(s, row, rows) for s in self.sources for row, rows in cut[s]]
        return [chunk for step in self._steps() for chunk in step]

    def _adjacent(self, step: list[tuple[int, int, int]]) -> bool:
        """Whether the chunks of a step are adjacent in the gathered X, in this order, and arrive
        over links. If so, they need no packing."""
        reached: int | None = None
        for source, row, rows in step:
            there = self.offsets[source] + row
            if source == self.rank or (reached is not None and there != reached):
                return False
            reached = there + rows
        return True


def _scatter(
    product: Buffer, y: Buffer, rows: list[tuple[int, int]]
) -> list[tuple[Region, Region]]:
    moves, base = [], 0
    for row, size in rows:
        moves.append((product.rows_of(base, size), y.rows_of(row, size)))
        base += size
    return moves


def _name(label: str, index: int, weights: list[Buffer]) -> str:
    return label if len(weights) == 1 else f"{label} w{index}"
