"""Lowers products that communicate from inside their kernel, and the serial all-reduce of few rows
that they are compared with.

Every rank launches one kernel. Its workers compute what peers need first, one slice for each peer
in turn, and store each slice directly into the memory of that peer. The rank's own rows come last.
For two ranks, where y1 is what the other rank needs, `>` is a store into its memory, and `+` is a
sum over both ranks:

    all-to-all   compute| y1.0> y1.1> y1.2> y1.3> | y0 ........ |wait|
    all-reduce   compute| y1.0> y1.1> y1.2> y1.3> | y0.0 +> y0.1 +> y0.2 +> y0.3 +> |wait|

All-to-all cuts rows, because each row of the product is needed by one rank. All-reduce cuts
columns, so that even a single row can be distributed: the owner of a block adds the products of all
ranks, in the order of ranks, and stores the sum into every rank's result. Nothing is packed, staged
or copied.
"""

from __future__ import annotations

from functools import lru_cache

from weft.dtype import ITEM_BYTES, accumulator
from weft.operation import result_dtype, split, starts
from weft.plan.builder import Builder, refuse_impossible
from weft.plan.order import slices
from weft.plan.scatter_products import Scattering
from weft.plan.tasks import Part, Plan, Region
from weft.schedule import Schedule

MAX_SLICES = 16
"""The largest number of slices per peer. Each slice has a counter of its own."""
SLICE_COLUMNS = 128
SLICE_ROWS = 64


def inbox_bytes(world: int, rank: int, m: int, n: int, dtype: str) -> int:
    """The bytes of the workspace into which peers store their terms of a rank's sums. Terms are
    sent in the accumulator of the result's dtype: they are not rounded before they are added."""
    return m * (world - 1) * split(n, world)[rank] * ITEM_BYTES[accumulator(dtype)]


@lru_cache(maxsize=64)
def lower(operation: Scattering, schedule: Schedule) -> Plan:
    """The plan of all ranks, with one launch per rank."""
    refuse_impossible(schedule, in_kernel=True)
    builder = Builder(operation, schedule)
    if operation.summed:
        _all_reduce(builder, operation, schedule.depth)
    elif operation.world == 1:
        _alone(builder, operation)
        return builder.plan()
    else:
        _all_to_all(builder, operation, schedule.depth)
    return builder.plan(one_launch=True)


def _alone(builder: Builder, op: Scattering) -> None:
    rows = sum(op.sizes(0))
    x = builder.add_buffer("x", 0, rows, op.inner[0], "input")
    w = builder.add_buffer("w", 0, op.inner[0], op.n, "input")
    y = builder.add_buffer("y", 0, rows, op.n, "output", result_dtype(op))
    builder.matmul(0, x.all(), w.all(), y.all(), label="all")


def _peers(rank: int, world: int) -> list[int]:
    """The other ranks, starting with the next: no two ranks store to the same one at once."""
    return [(rank + step) % world for step in range(1, world)]


def _all_to_all(builder: Builder, op: Scattering, depth: int | None) -> None:
    world = op.world
    sizes = [tuple(op.sizes(rank)) for rank in range(world)]
    most = max(max(rows) for rows in sizes)
    depth = depth or min(MAX_SLICES, -(-most // SLICE_ROWS) or 1)
    xs = [builder.add_buffer("x", r, sum(sizes[r]), op.inner[r], "input") for r in range(world)]
    ws = [builder.add_buffer("w", r, op.inner[r], op.n, "input") for r in range(world)]
    received = [[sizes[maker][owner] for maker in range(world)] for owner in range(world)]
    result = result_dtype(op)
    ys = [
        builder.add_buffer("y", r, sum(received[r]), op.n, "output", result) for r in range(world)
    ]
    stored: list[list[int | None]] = [[] for _ in range(world)]

    def part(maker: int, owner: int, row: int, rows: int) -> Part:
        first = starts(sizes[maker])[owner] + row
        place = starts(received[owner])[maker] + row
        a, c = xs[maker].rows_of(first, rows), ys[owner].rows_of(place, rows)
        return Part(a, ws[maker].all(), c)

    for rank in range(world):
        for number in range(depth):
            cuts = [
                (owner, *slices(sizes[rank][owner], depth)[number])
                for owner in _peers(rank, world)
                if number < len(slices(sizes[rank][owner], depth))
            ]
            parts = [part(rank, owner, row, rows) for owner, row, rows in cuts]
            task = builder.tiles(rank, parts, label=f"slice {number} for peers")
            for owner in range(world):
                if owner != rank:
                    stored[owner].append(task)
        own = part(rank, rank, 0, sizes[rank][rank])
        builder.tiles(rank, [own], label="own rows")
    for rank in range(world):
        builder.wait(rank, _writing(builder, stored[rank], ys[rank].all()), label="slices of peers")


def _all_reduce(builder: Builder, op: Scattering, depth: int | None) -> None:
    world, n, m = op.world, op.n, sum(op.sizes(0))
    columns = split(n, world)
    first = starts(columns)
    if depth is None:  # slices are for peers to start early
        depth = min(MAX_SLICES, -(-columns[0] // SLICE_COLUMNS) or 1) if world > 1 else 1
    result = result_dtype(op)
    dtype = accumulator(result)
    xs = [builder.add_buffer("x", r, m, op.inner[r], "input") for r in range(world)]
    for rank in range(world):
        builder.add_buffer("w", rank, op.inner[rank], n, "input")
        builder.add_buffer("y", rank, m, n, "output", result)
        builder.add_buffer("partial", rank, m, columns[rank], "workspace", dtype)
        builder.add_buffer("inbox", rank, m * (world - 1), columns[rank], "workspace", dtype)
    made: dict[tuple[int, int], list[int | None]] = {}

    def box(maker: int, owner: int, column: int, size: int) -> Region:
        if maker == owner:
            return Region(owner, "partial", 0, m, column, size)
        return Region(owner, "inbox", m * (maker - (maker > owner)), m, column, size)

    def part(maker: int, owner: int, column: int, size: int) -> Part:
        w = Region(maker, "w", 0, op.inner[maker], first[owner] + column, size)
        return Part(xs[maker].all(), w, box(maker, owner, column, size))

    def blocks(owner: int) -> tuple[tuple[int, int], ...]:
        return slices(columns[owner], depth)

    for rank in range(world):
        for number in range(depth):
            owners = [o for o in _peers(rank, world) if number < len(blocks(o))]
            parts = [part(rank, owner, *blocks(owner)[number]) for owner in owners]
            task = builder.tiles(rank, parts, label=f"block {number} of peers")
            for owner in owners:
                made.setdefault((owner, number), []).append(task)
    sums: list[list[int | None]] = []
    for rank in range(world):
        sums.append([])
        for number, (column, size) in enumerate(blocks(rank)):
            mine = builder.tiles(rank, [part(rank, rank, column, size)], label=f"block {number}")
            targets = [
                Region(other, "y", 0, m, first[rank] + column, size)
                for other in (rank, *_peers(rank, world))
            ]
            task = builder.reduce(
                rank,
                [box(maker, rank, column, size) for maker in range(world)],
                targets,
                after=[mine, *made.get((rank, number), [])],
                label=f"sum of block {number}",
            )
            sums[rank].append(task)
    for rank in range(world):
        theirs = [task for other in _peers(rank, world) for task in sums[other]]
        builder.wait(rank, theirs, label="sums of peers")


def _writing(builder: Builder, tasks: list[int | None], region: Region) -> list[int]:
    """The tasks that write to the buffer of a region."""
    return [
        task
        for task in tasks
        if task is not None and any(r.key == region.key for r in builder.tasks[task].writes())
    ]


@lru_cache(maxsize=64)
def lower_serial(operation: Scattering, schedule: Schedule) -> Plan:
    """The serial all-reduce with columns distributed over the ranks: one product, an exchange of
    its blocks, sums, and an exchange of the sums."""
    refuse_impossible(schedule)
    builder, op = Builder(operation, schedule), operation
    world, n, m = op.world, op.n, sum(op.sizes(0))
    columns = split(n, world)
    first = starts(columns)
    products, sums, result = [], [], result_dtype(op)
    for rank in range(world):
        x = builder.add_buffer("x", rank, m, op.inner[rank], "input")
        w = builder.add_buffer("w", rank, op.inner[rank], n, "input")
        builder.add_buffer("y", rank, m, n, "output", result)
        partial = builder.add_buffer("partial", rank, m, n, "workspace", result)
        builder.add_buffer("inbox", rank, m * (world - 1), columns[rank], "workspace", result)
        builder.add_buffer("reduced", rank, m, columns[rank], "workspace", result)
        products.append(builder.matmul(rank, x.all(), w.all(), partial.all(), label="all"))
    for rank in range(world):
        after: list[int | None] = [products[rank]]
        parts: dict[int, Region] = {}
        for maker in range(world):
            source = Region(maker, "partial", 0, m, first[rank], columns[rank])
            parts[maker] = source
            if maker != rank:
                row = m * (maker - (maker > rank))
                parts[maker] = Region(rank, "inbox", row, m, 0, columns[rank])
        for maker in _peers(rank, world)[::-1]:
            source = Region(maker, "partial", 0, m, first[rank], columns[rank])
            label = f"block {rank} of {maker}"
            after.append(
                builder.copy(
                    rank, source, parts[maker], peer=maker, after=[products[maker]], label=label
                )
            )
        own = Region(rank, "y", 0, m, first[rank], columns[rank])
        passed = Region(rank, "reduced", 0, m, 0, columns[rank])
        sources = [parts[maker] for maker in range(world)]
        sums.append(builder.reduce(rank, sources, [passed, own], after=after, label="sum"))
    for rank in range(world):
        for owner in _peers(rank, world)[::-1]:
            source = Region(owner, "reduced", 0, m, 0, columns[owner])
            target = Region(rank, "y", 0, m, first[owner], columns[owner])
            label = f"sum of {owner}"
            builder.copy(rank, source, target, peer=owner, after=[sums[owner]], label=label)
    return builder.plan()
