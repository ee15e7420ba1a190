"""Concurrent, independent work: a GEMM on every rank, and a collective that the GEMM does not need.

FSDP does this when it gathers the weights of the next layer during the GEMM of this one. The
collective is flat: every rank pulls from all its peers at once, with one engine per peer. It is in
place: a rank's own shard stays where it is, and `received` holds the shards of the peers in the
order of ranks. With 3 ranks, on rank 0:

    compute     | a @ b                     |
    engine 1    | shard of rank 1 |
    engine 2    | shard of rank 2 |

Collectives that add (reduce-scatter, all-reduce) can be simulated but not run: their bytes travel
as those of a gather, and the compute units that move them add on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from weft.dtype import ITEM_BYTES
from weft.errors import InvalidPlan, Unsupported, nearest
from weft.operation import ranks_label, split, starts
from weft.plan.builder import Builder
from weft.plan.collective import KINDS, UNROOTED, KindName
from weft.plan.contents import Contents, Data, Product, covers_once
from weft.plan.tasks import Buffer, Plan
from weft.schedule import Schedule
from weft.strategy import Strategy

Collective = KindName
COLLECTIVES: tuple[KindName, ...] = tuple(kind for kind in UNROOTED if not KINDS[kind].sums)
"""The kinds that run as planned: they need no compute of their own."""
SUMMING: tuple[KindName, ...] = tuple(kind for kind in UNROOTED if KINDS[kind].sums)
"""The kinds that are simulated only."""
WIDTH = 4096
"""Elements per row of the collective's tensors where only the number of bytes matters."""


@dataclass(frozen=True)
class Concurrent:
    """C = A[m, k] @ B[k, n] on every rank, concurrent with a collective over X [rows, columns].

    rows: rows of X on each rank. An all-to-all brings the rank's part of a peer's X to it, evenly
    split; the others bring all of it.
    """

    m: int
    n: int
    k: int
    collective: KindName
    rows: tuple[int, ...]
    columns: int = WIDTH
    dtype: str = "float32"
    counted: int | None = None  # bytes as libraries count them, where others travel

    name: ClassVar[str] = "concurrent"
    routed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        known = (*COLLECTIVES, *SUMMING)
        if self.collective not in known:
            raise Unsupported(
                f"there is no collective {self.collective!r}{nearest(self.collective, known)}; "
                f"known: {', '.join(known)}"
            )
        if min(self.m, self.n, self.k, self.columns, *self.rows) < 0 or not self.rows:
            raise Unsupported("sizes must be zero or more, and there must be a rank")

    @classmethod
    def of(
        cls,
        shape: tuple[int, int, int],
        collective: KindName,
        num_bytes: int,
        world: int,
        dtype: str = "float32",
        moved: int | None = None,
    ) -> Concurrent:
        """The operation with a GEMM of M, N, K and a collective of that many bytes, as libraries
        count them: the gathered result of an all-gather, the input of the others.

        moved: what an all-gather would have to gather to send as many bytes as this collective
        does, where that is not `num_bytes`. An all-reduce sends about twice its vector, or once
        where the switch adds.
        """
        item = ITEM_BYTES[dtype]
        elements = -(-(num_bytes if moved is None else moved) // item)
        columns = min(WIDTH, max(1, elements // (world * world)))
        total = -(-elements // columns)
        rows = (total,) * world if collective == "all_to_all" else split(total, world)
        counted = None if moved is None else num_bytes
        return cls(*shape, collective, rows, columns, dtype, counted)

    @property
    def world(self) -> int:
        return len(self.rows)

    @property
    def label(self) -> str:
        size = f"{self.total_bytes / 2**20:.4g} MiB"
        shape = f"{self.m}x{self.n}x{self.k} {self.dtype}"
        return f"matmul {shape} beside {self.collective} of {size} on {ranks_label(self.world)}"

    @property
    def total_bytes(self) -> int:
        """Bytes of the collective, as libraries count them."""
        if self.counted is not None:
            return self.counted
        rows = max(self.rows) if self.collective == "all_to_all" else sum(self.rows)
        return rows * self.columns * ITEM_BYTES[self.dtype]

    def span(self, source: int, target: int) -> tuple[int, int]:
        """(first row, rows) of the source's X that the target receives."""
        if self.collective != "all_to_all":
            return 0, self.rows[source]
        parts = split(self.rows[source], self.world)
        return starts(parts)[target], parts[target]

    def num_flops(self, rank: int) -> int:
        return 2 * self.m * self.n * self.k

    def num_bytes(self, source: int, target: int) -> int:
        rows = 0 if source == target else self.span(source, target)[1]
        return rows * self.columns * ITEM_BYTES[self.dtype]

    def num_received(self, rank: int) -> int:
        """The number of rows that a rank receives from all its peers."""
        return sum(self.span(peer, rank)[1] for peer in range(self.world) if peer != rank)

    def compute_only(self) -> Concurrent:
        """The GEMM of one rank alone."""
        return replace(self, rows=(0,), counted=None)

    def communication_only(self) -> Concurrent:
        """The collective alone."""
        return replace(self, m=0, n=0, k=0)

    def lower(self, schedule: Strategy | Schedule) -> Plan:
        if not isinstance(schedule, Strategy):
            raise Unsupported(
                f"independent work is planned by a strategy such as dma, not by {schedule}"
            )
        if schedule.engine == "dma" and self.collective in SUMMING:
            raise Unsupported(
                f"copy engines cannot add, and {self.collective} adds; let the cores move it"
            )
        return _lower(self, schedule)

    def check(self, plan: Plan, contents: Contents) -> None:
        """Raises unless C is A @ B and every received row is in its place."""
        for rank in range(self.world):
            terms = []
            for held in contents.of(rank, "c"):
                value = held.value
                if not isinstance(value, Product) or (value.row, value.column) != (
                    held.row,
                    held.column,
                ):
                    raise InvalidPlan(f"c@{rank} holds something else than A @ B")
                terms.append((held.row, held.rows, held.column, held.columns, value.k, value.size))
            if self.k:
                covers_once(terms, (self.m, self.n, self.k), f"c@{rank}")
            self._check_received(rank, contents)

    def _check_received(self, rank: int, contents: Contents) -> None:
        holdings = contents.of(rank, "received")
        boxes = [(held.row, held.rows, held.column, held.columns, 0, 1) for held in holdings]
        covers_once(boxes, (self.num_received(rank), self.columns, 1), f"received@{rank}")
        for peer, at in _places(self, rank).items():
            first, rows = self.span(peer, rank)
            for held in holdings:
                inside = held.cut(at, rows, 0, self.columns)
                if inside is not None and inside.value != Data(
                    (peer, "x"), first + inside.row - at, inside.column
                ):
                    raise InvalidPlan(f"received@{rank} holds something else than x@{peer}")


@lru_cache(maxsize=256)
def _lower(operation: Concurrent, strategy: Strategy) -> Plan:
    """The plan for a strategy. What is launched first is first among a rank's tasks, and only the
    serial strategy has dependencies."""
    builder = Builder(operation, Schedule.parse(f"serial@{strategy.engine}"))
    add, world = builder.add_buffer, operation.world
    x = [add("x", rank, operation.rows[rank], operation.columns, "input") for rank in range(world)]
    for rank in range(world):
        a = add("a", rank, operation.m, operation.k, "input")
        b = add("b", rank, operation.k, operation.n, "input")
        c = add("c", rank, operation.m, operation.n, "output")
        received = add("received", rank, operation.num_received(rank), operation.columns, "output")
        ahead = strategy.serial or strategy.prioritized
        pulled = _pull(builder, operation, rank, x, received) if ahead else []
        after = pulled if strategy.serial else ()
        builder.matmul(rank, a.all(), b.all(), c.all(), after=after, label="a @ b")
        if not ahead:
            _pull(builder, operation, rank, x, received)
    return replace(builder.plan(), schedule=strategy)


def _pull(
    builder: Builder, operation: Concurrent, rank: int, x: Sequence[Buffer], received: Buffer
) -> list[int | None]:
    """Pulls the rows of all peers, starting with the next rank, so that no two ranks start with the
    same peer."""
    places = _places(operation, rank)
    pulled = []
    for step in range(1, operation.world):
        peer = (rank + step) % operation.world
        first, rows = operation.span(peer, rank)
        source, target = x[peer].rows_of(first, rows), received.rows_of(places[peer], rows)
        pulled.append(builder.copy(rank, source, target, peer=peer, label=f"shard of rank {peer}"))
    return pulled


def _places(operation: Concurrent, rank: int) -> dict[int, int]:
    """For every peer, the first row of its rows in `received`."""
    peers = [peer for peer in range(operation.world) if peer != rank]
    sizes = [operation.span(peer, rank)[1] for peer in peers]
    return dict(zip(peers, starts(sizes), strict=True))
