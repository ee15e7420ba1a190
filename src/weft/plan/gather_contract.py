"""Gathers along K, as weight gradients need it: G_i = (gathered rows of X)^T @ D_i.

The gathered rows are the contracted dimension. Every arriving chunk is accumulated:
G += X_chunk^T @ D_chunk. The order is fixed, because sums in the order of arrival would differ in
their last bits from run to run. Spans are the rows of X that a rank gathers, as in `gathering`.

    hetero-unfused-1d  engine | x1.0  x1.1  x1.2  x1.3 |
                       compute| x0          |x1.0|x1.1 |x1.2|x1.3|
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from weft.dtype import ITEM_BYTES, NARROW, accumulator
from weft.errors import InvalidPlan
from weft.operation import dtypes_label, ranks_label, register, result_dtype, split, starts
from weft.plan.builder import Builder, refuse_impossible
from weft.plan.contents import Contents, Product, covers_once
from weft.plan.order import slices
from weft.plan.tasks import Buffer, Plan, Region
from weft.schedule import Schedule

DEPTH = 8
"""The default number of chunks per shard. It is small, because every chunk updates all of G."""


@register
@dataclass(frozen=True)
class GatherContract:
    """G_i on rank r = (its spans of every rank's X, concatenated by rows)^T @ D_i.

    rows: rows of X on each rank. taken: per rank, the span (first row, rows) that it gathers from
    each rank's X. k: columns of X. columns: per rank, the columns of each of its D_i. result: the
    dtype of every G_i, if not that of X.
    """

    rows: tuple[int, ...]
    taken: tuple[tuple[tuple[int, int], ...], ...]
    k: int
    columns: tuple[tuple[int, ...], ...]
    dtype: str = "float32"
    result: str | None = None

    name: ClassVar[str] = "gather_contract"

    @classmethod
    def of(
        cls,
        m: int,
        n: int,
        k: int,
        world: int,
        dtype: str = "float32",
        result: str | None = None,
    ) -> GatherContract:
        """The weight gradient of an all-gather + matmul: every rank gathers all M rows."""
        rows = split(m, world)
        taken = (tuple((0, size) for size in rows),) * world
        return cls(rows, taken, k, ((n,),) * world, dtype, result)

    @property
    def world(self) -> int:
        return len(self.rows)

    def received(self, rank: int) -> int:
        """The number of rows that a rank gathers."""
        return sum(rows for _, rows in self.taken[rank])

    @property
    def label(self) -> str:
        columns = "+".join(str(n) for n in self.columns[0])
        sizes = f"{self.k}x{columns}x{self.received(0)}"
        return f"{self.name} {sizes} {dtypes_label(self)} on {ranks_label(self.world)}"

    def num_flops(self, rank: int) -> int:
        return 2 * self.received(rank) * sum(self.columns[rank]) * self.k

    def num_bytes(self, source: int, target: int) -> int:
        rows = 0 if source == target else self.taken[target][source][1]
        return rows * self.k * ITEM_BYTES[self.dtype]

    def compute_only(self) -> GatherContract:
        """The GEMM of one rank, without communication."""
        m = self.received(0)
        return replace(self, rows=(m,), taken=(((0, m),),), columns=self.columns[:1])

    def refuses(self, schedule: Schedule) -> str | None:
        """The reason why this operation cannot have a schedule, or None if it can."""
        return refuses(schedule)

    def lower(self, schedule: Schedule) -> Plan:
        return lower(self, schedule)

    def check(self, plan: Plan, contents: Contents) -> None:
        for rank in range(self.world):
            for index, n in enumerate(self.columns[rank]):
                _check(self, contents, rank, index, n)


def refuses(schedule: Schedule) -> str | None:
    """The reason why a gather along K cannot have a schedule, or None if it can."""
    if schedule.serial:
        return None
    if schedule.fusion == "adaptive":
        return "gathered along K, the order of sums would depend on which rows arrive first"
    if schedule.fusion == "fused" or schedule.cut == "columns":
        return "gathered along K, every chunk adds to the whole result, so it has its own GEMM"
    return None


@lru_cache(maxsize=64)
def lower(operation: GatherContract, schedule: Schedule) -> Plan:
    """The plan of all ranks; raises `Unsupported` with the reason if the schedule is impossible."""
    refuse_impossible(schedule, operation.refuses(schedule))
    builder = Builder(operation, schedule)
    depth = DEPTH if schedule.depth is None else max(schedule.depth, 1)
    for rank in range(operation.world):
        _lower_rank(builder, operation, rank, 1 if schedule.engine == "direct" else depth)
    return builder.plan()


def _lower_rank(builder: Builder, op: GatherContract, rank: int, depth: int) -> None:
    schedule, add = builder.schedule, builder.add_buffer
    spans = op.taken[rank]
    offsets, m = starts([rows for _, rows in spans]), op.received(rank)
    add("x", rank, op.rows[rank], op.k, "input")
    ds = [add(f"d{i}", rank, m, n, "input") for i, n in enumerate(op.columns[rank])]
    result = result_dtype(op)
    gs = [add(f"g{i}", rank, op.k, n, "output", result) for i, n in enumerate(op.columns[rank])]
    in_place = schedule.engine == "direct"
    chunks = _chunks(op, schedule, rank, depth)
    gathered: Buffer | None = None
    if op.world > 1 and not in_place:
        gathered = add("gathered", rank, m, op.k, "workspace")
    sums = gs
    if result in NARROW and len(chunks) > 1:
        sums = [
            add(f"sum{i}", rank, g.rows, g.columns, "workspace", accumulator(result))
            for i, g in enumerate(gs)
        ]
    pulled: int | None = None
    arrived: list[int | None] = []
    for source, row, rows in chunks:
        region = Region(source, "x", spans[source][0] + row, rows, 0, op.k)
        task = None
        if gathered is not None and (source != rank or schedule.serial):
            target = gathered.rows_of(offsets[source] + row, rows)
            chained = pulled if schedule.pattern == "peer" else None
            label = f"x{source}[{row}:{row + rows}]"
            task = builder.copy(rank, region, target, peer=source, after=[chained], label=label)
            pulled, region = task if source != rank else pulled, target
        arrived.append(task)
        if not schedule.serial:
            there = offsets[source] + row
            first = len(arrived) == 1
            _contract(builder, rank, region, there, ds, sums, not first, [task])
    if schedule.serial or not chunks:
        whole = (
            gathered.all()
            if gathered is not None
            else Region(rank, "x", spans[rank][0], m, 0, op.k)
        )
        _contract(builder, rank, whole, 0, ds, sums, False, arrived)
    if sums is not gs:
        for total, g in zip(sums, gs, strict=True):
            builder.permute(rank, [(total.all(), g.all())], label="round")


def _chunks(
    op: GatherContract, schedule: Schedule, rank: int, depth: int
) -> list[tuple[int, int, int]]:
    """(source, row, rows) of the chunks in the order of accumulation."""
    peers = [(rank + step) % op.world for step in range(1, op.world)]
    taken = op.taken[rank]
    if schedule.serial or op.world == 1:
        return [(s, 0, taken[s][1]) for s in [*peers, rank] if taken[s][1]] if op.world > 1 else []
    sources = peers if schedule.start == "local" else [rank, *peers]
    cuts = [[(s, *cut) for cut in slices(taken[s][1], depth)] for s in sources]
    if schedule.pattern == "peer":
        chunks = [chunk for cut in cuts for chunk in cut]
    else:
        longest = max(map(len, cuts))
        chunks = [cut[i] for i in range(longest) for cut in cuts if i < len(cut)]
    if schedule.start == "local":
        chunks.insert(0, (rank, 0, taken[rank][1]))
    return [chunk for chunk in chunks if chunk[2]]


def _contract(
    builder: Builder,
    rank: int,
    x: Region,
    row: int,
    ds: Sequence[Buffer],
    sums: Sequence[Buffer],
    accumulate: bool,
    after: Sequence[int | None],
) -> None:
    for d, total in zip(ds, sums, strict=True):
        builder.matmul(
            rank,
            x,
            d.rows_of(row, x.rows),
            total.all(),
            accumulate=accumulate,
            transposed=True,
            after=after,
            label=f"x{x.rank}[{x.row}:{x.row + x.rows}]",
        )


def _check(op: GatherContract, contents: Contents, rank: int, index: int, n: int) -> None:
    spans, m = op.taken[rank], op.received(rank)
    offsets = starts([rows for _, rows in spans])
    boxes = []
    for held in contents.of(rank, f"g{index}"):
        value = held.value
        if not isinstance(value, Product) or value.b != (rank, f"d{index}"):
            raise InvalidPlan(f"g{index}@{rank} holds {value} where a product belongs")
        if m == 0:  # there are no terms, but zeros must be written exactly once
            boxes.append((held.row, held.rows, held.column, held.columns, 0, 1))
            continue
        first, rows = spans[value.a[0]]
        at = value.k - first
        inside = value.a[1] == "x" and at >= 0 and at + value.size <= rows
        met = value.k + value.shift == offsets[value.a[0]] + at
        if not inside or not met or (held.row, held.column) != (value.row, value.column):
            raise InvalidPlan(f"g{index}@{rank}: rows of x{value.a[0]} meet the wrong rows")
        k = offsets[value.a[0]] + at
        boxes.append((held.row, held.rows, held.column, held.columns, k, value.size))
    covers_once(boxes, (op.k, n, max(m, 1)), f"g{index}@{rank}")
