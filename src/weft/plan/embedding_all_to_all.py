"""Embedding lookups, then all-to-all: every rank holds some of the tables, and receives the pooled
rows of all tables for its share of the batch. Recommendation models (DLRM) do this.

A lookup can write a bag's pooled rows to any address. So a serial or chunked schedule needs no
packing: lookups fill `partial`, and copies move its rows to their columns of y. The schedule
`in-kernel` has no `partial`: workers store pooled rows directly into the y of the rank that needs
them. Lookups proceed table by table, because the data caches and the TLB keep the rows and pages of
the table in use. Within a table, the bags of peers come first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from weft.dtype import ITEM_BYTES
from weft.errors import InvalidPlan
from weft.operation import ranks_label, register, split, starts
from weft.plan.builder import Builder, refuse_impossible
from weft.plan.contents import Contents, Data, covers_once
from weft.plan.order import slices
from weft.plan.tasks import Buffer, Plan, Region
from weft.schedule import Schedule

MAX_SLICES = 16
"""The largest number of slices of a rank's lookups. Each slice has a counter of its own."""
SLICE_BAGS = 512
"""The smallest number of bags of a rank in a slice of a table."""


@register
@dataclass(frozen=True)
class EmbeddingAllToAll:
    """Y on rank r = the pooled rows of the tables of rank 0, rank 1, and so on, for the bags of r.

    batch: per rank, the number of bags that it receives. columns: per rank, the sum of the dims of
    its tables. pooling: the mean number of rows in a bag, or 0 if unknown; it affects times, not
    results. tables: per rank, the dims of its tables, if they are known.
    """

    batch: tuple[int, ...]
    columns: tuple[int, ...]
    pooling: int = 0
    dtype: str = "float32"
    tables: tuple[tuple[int, ...], ...] = ()

    name: ClassVar[str] = "embedding_all_to_all"
    routed: ClassVar[bool] = True
    in_kernel: ClassVar[bool] = True

    @classmethod
    def of(cls, m: int, n: int, k: int, world: int, dtype: str = "float32") -> EmbeddingAllToAll:
        """A batch of M bags, tables with N columns in total on every rank, and K rows per bag."""
        return cls(split(m, world), (n,) * world, k, dtype)

    @property
    def world(self) -> int:
        return len(self.batch)

    @property
    def label(self) -> str:
        bags = f"{sum(self.batch)} bags" + (f" of {self.pooling} rows" if self.pooling else "")
        columns = f"{self.columns[0]} columns a rank"
        return f"{self.name} of {bags}, {columns}, {self.dtype} on {ranks_label(self.world)}"

    def num_flops(self, rank: int) -> int:
        return sum(self.batch) * self.columns[rank] * self.pooling

    def num_bytes(self, source: int, target: int) -> int:
        bags = 0 if source == target else self.batch[target]
        return bags * self.columns[source] * ITEM_BYTES[self.dtype]

    def compute_only(self) -> EmbeddingAllToAll:
        """The lookups of one rank, without communication."""
        first = self.columns[:1]
        return replace(self, batch=(sum(self.batch),), columns=first, tables=self.tables[:1])

    def refuses(self, schedule: Schedule) -> str | None:
        """The reason why this operation cannot have a schedule, or None if it can."""
        if schedule.fusion == "adaptive":
            return "lookups wait for nothing, so there is nothing to adapt to"
        if schedule.cut == "columns":
            return "a chunk is a slice of the batch, for that is what another rank needs"
        if schedule.engine == "direct" and schedule.fusion != "kernel":
            return "lookups that store into peers' memory are one kernel: in-kernel@direct"
        return None

    def lower(self, schedule: Schedule) -> Plan:
        return _lower(self, schedule)

    def check(self, plan: Plan, contents: Contents) -> None:
        for rank in range(self.world):
            boxes: dict[int, list[tuple[int, int, int, int, int, int]]] = {}
            for held in contents.of(rank, "y"):
                value = held.value
                if not isinstance(value, Data) or value.buffer[1] != "bags":
                    raise InvalidPlan(f"y@{rank} holds {value} where pooled rows belong")
                maker = value.buffer[0]
                at = held.column - starts(self.columns)[maker]
                inside = 0 <= at <= self.columns[maker] - held.columns
                bag = starts(self.batch)[rank] + held.row
                if not inside or (value.row, value.column) != (bag, at):
                    raise InvalidPlan(f"y@{rank}: bags of rank {maker} are in the wrong place")
                boxes.setdefault(maker, []).append((held.row, held.rows, at, held.columns, 0, 1))
            for maker in range(self.world):
                size = (self.batch[rank], self.columns[maker], 1)
                covers_once(boxes.get(maker, []), size, f"y@{rank} from rank {maker}")


@lru_cache(maxsize=64)
def _lower(op: EmbeddingAllToAll, schedule: Schedule) -> Plan:
    refuse_impossible(schedule, op.refuses(schedule), in_kernel=True)
    lowering = _EmbeddingLowering(op, schedule)
    if op.world == 1:
        lowering.store(0, [(0, 0, op.batch[0])], "all")
    elif schedule.fusion == "kernel":
        lowering.fused()
    else:
        lowering.chunked()
    return lowering.builder.plan(one_launch=schedule.fusion == "kernel")


Chunk = tuple[int, int, int]
"""The rank that needs the bags, the first of that rank's bags, and the number of bags."""


class _EmbeddingLowering:
    def __init__(self, op: EmbeddingAllToAll, schedule: Schedule) -> None:
        self.op, self.schedule = op, schedule
        self.builder = Builder(op, schedule)
        self.first_bag, self.first_column = starts(op.batch), starts(op.columns)
        self.bags: list[Buffer] = []
        self.y: list[Buffer] = []
        self.partial: list[Buffer] = []
        add = self.builder.add_buffer
        for rank in range(op.world):
            self.bags.append(add("bags", rank, sum(op.batch), op.columns[rank], "input"))
            self.y.append(add("y", rank, op.batch[rank], sum(op.columns), "output"))
            if op.world > 1 and schedule.fusion != "kernel":
                rows, columns = sum(op.batch), op.columns[rank]
                self.partial.append(add("partial", rank, rows, columns, "workspace"))
        self.depth = MAX_SLICES if schedule.fusion == "kernel" else op.world
        if schedule.depth is not None:
            self.depth = max(schedule.depth, 1)

    def fused(self) -> None:
        op = self.op
        stored: list[list[int | None]] = [[] for _ in range(op.world)]
        for rank in range(op.world):
            groups = self._groups(rank)
            cuts = min(self.depth // len(groups), -(-max(op.batch) // SLICE_BAGS)) or 1
            if self.schedule.depth is not None:
                cuts = -(-self.depth // len(groups))
            for group, columns in enumerate(groups):
                for number in range(cuts):
                    chunks = self._step(number, [*self._after(rank), rank], cuts)
                    label = f"slice {group * cuts + number}"
                    task = self.store(rank, chunks, label, columns)
                    for owner, _, _ in chunks if columns[1] else ():
                        if owner != rank:
                            stored[owner].append(task)
        for rank in range(op.world):
            self.builder.wait(rank, stored[rank], label="slices of peers")

    def _groups(self, rank: int) -> list[tuple[int, int]]:
        """(first column, columns) of every slice. A slice has whole tables, and all slices have
        about the same number of columns."""
        op, columns = self.op, self.op.columns[rank]
        if not op.tables:
            return list(slices(columns, self.depth))
        groups: list[tuple[int, int]] = []
        first = end = 0
        for dim in op.tables[rank]:
            end += dim
            if (end - first) * self.depth >= columns and end > first:
                groups.append((first, end - first))
                first = end
        if end > first or not groups:
            groups.append((first, end - first))
        return groups

    def chunked(self) -> None:
        op = self.op
        made: dict[tuple[int, int], list[tuple[Chunk, int | None]]] = {}
        for rank in range(op.world):
            for chunks in self._launches(rank):
                task = self._fill(rank, chunks)
                for chunk in chunks:
                    made.setdefault((rank, chunk[0]), []).append((chunk, task))
            if self.schedule.start == "local" and not self.schedule.serial:
                self.store(rank, [(rank, 0, op.batch[rank])], "own slice")
        for rank in range(op.world):
            last: int | None = None
            for maker in self._after(rank)[::-1]:
                for chunk, task in made.get((maker, rank), []):
                    source = self._rows(self.partial[maker], rank, chunk)
                    target = self._target(maker, chunk)
                    chained = last if self.schedule.pattern == "peer" else None
                    label = f"bags of {maker} [{chunk[1]}:{chunk[1] + chunk[2]}]"
                    copy = self.builder.copy(
                        rank, source, target, peer=maker, after=[task, chained], label=label
                    )
                    last = copy if copy is not None else last
            moves = [
                (self._rows(self.partial[rank], rank, chunk), self._target(rank, chunk))
                for chunk, _ in made.get((rank, rank), [])
            ]
            after = [task for _, task in made.get((rank, rank), [])]
            self.builder.permute(rank, moves, after=after, label="keep own bags")

    def _launches(self, rank: int) -> list[list[Chunk]]:
        """The chunks of every launch that writes to `partial`."""
        op, after = self.op, self._after(rank)
        if self.schedule.serial:
            return [[(owner, 0, op.batch[owner]) for owner in range(op.world)]]
        owners = after if self.schedule.start == "local" else [*after, rank]
        steps = [self._step(number, owners) for number in range(self.depth)]
        if self.schedule.fusion == "fused":
            return [step for step in steps if step]
        if self.schedule.pattern == "peer":
            return [[c] for owner in owners for step in steps for c in step if c[0] == owner]
        return [[chunk] for step in steps for chunk in step]

    def _step(self, number: int, owners: list[int], depth: int | None = None) -> list[Chunk]:
        cuts = [(owner, slices(self.op.batch[owner], depth or self.depth)) for owner in owners]
        return [(o, *cut[number]) for o, cut in cuts if number < len(cut) and cut[number][1]]

    def _after(self, rank: int) -> list[int]:
        return [(rank + step) % self.op.world for step in range(1, self.op.world)]

    def _rows(self, buffer: Buffer, owner: int, chunk: Chunk) -> Region:
        return buffer.rows_of(self.first_bag[owner] + chunk[1], chunk[2])

    def _target(self, maker: int, chunk: Chunk) -> Region:
        owner, row, rows = chunk
        return Region(owner, "y", row, rows, self.first_column[maker], self.op.columns[maker])

    def store(
        self, rank: int, chunks: list[Chunk], label: str, columns: tuple[int, int] | None = None
    ) -> int | None:
        """Looks up chunks and stores them on the ranks that need them.

        columns: (first column, columns) to look up; None for all.
        """
        moves = [(self._rows(self.bags[rank], c[0], c), self._target(rank, c)) for c in chunks]
        if columns is not None:
            moves = [(_some(source, *columns), _some(target, *columns)) for source, target in moves]
        return self.builder.lookup(rank, moves, self.op.pooling, label=label)

    def _fill(self, rank: int, chunks: list[Chunk]) -> int | None:
        moves = [
            (self._rows(self.bags[rank], c[0], c), self._rows(self.partial[rank], c[0], c))
            for c in chunks
        ]
        names = ", ".join(f"{owner}[{row}:{row + rows}]" for owner, row, rows in chunks[:2])
        return self.builder.lookup(rank, moves, self.op.pooling, label=f"bags of {names}")


def _some(region: Region, first: int, columns: int) -> Region:
    """Columns of a region, from the `first` on."""
    return region._replace(column=region.column + first, columns=columns)
