"""Gather, then multiply, on two levels: a chunk from another machine crosses the network once.

One rank of this machine, the carrier of the chunk, pulls it into shared memory (`relay`). The other
ranks copy it from there while the next chunk crosses. For 2 machines of 2 ranks, rank 0 carries x2:

    rank 0   network | x2.0  x2.1  x2.2  x2.3 |
             inside  | x1 | x3.0  x3.1  x3.2  x3.3 |     (from rank 1, which carries x3)
             compute | x0 | x1 | x2.0 x3.0 | x2.1 x3.1 | ...

Only rows are cut, with one GEMM per chunk or one over all chunks that have arrived. In an
all-to-all every rank needs other rows, so nothing can be shared, and the flat plan is used.
"""

from __future__ import annotations

from functools import lru_cache

from weft.operation import starts
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.plan.builder import Builder
from weft.plan.gathering import default_depth
from weft.plan.nodes import Nodes
from weft.plan.order import slices
from weft.plan.tasks import Plan, Region
from weft.schedule import Schedule

RELAY = "relay"
"""The workspace in which carriers keep what the other ranks of their machine need."""


def possible(schedule: Schedule) -> bool:
    """Whether there is a two-level plan for a schedule."""
    whole = schedule.serial or schedule.fusion in ("unfused", "adaptive")
    return whole and schedule.cut == "rows" and (schedule.serial or schedule.pattern == "all")


@lru_cache(maxsize=64)
def lower(operation: AllGatherMatmul, schedule: Schedule, nodes: Nodes) -> Plan:
    """The plan of all ranks."""
    depth = schedule.depth
    if depth is None:
        depth = default_depth(operation, schedule)
    builder = Builder(operation, schedule)
    ranks = [
        _TwoLevelGatherRank(builder, operation, rank, max(depth, 1), nodes)
        for rank in range(len(nodes.of))
    ]
    for rank in ranks:
        rank.carry()
    for rank in ranks:
        rank.gather(ranks)
        rank.multiply()
    return builder.plan()


class _TwoLevelGatherRank:
    """Lowers the tasks of one rank."""

    def __init__(
        self, builder: Builder, op: AllGatherMatmul, rank: int, depth: int, nodes: Nodes
    ) -> None:
        self.builder, self.op, self.rank, self.nodes = builder, op, rank, nodes
        self.serial = builder.schedule.serial
        self.offsets = starts(op.rows)
        self.chunks = {source: slices(op.rows[source], depth) for source in range(op.world)}
        self.mates = nodes.mates(rank)
        add = builder.add_buffer
        self.x = add("x", rank, op.rows[rank], op.k, "input")
        self.w = [add(f"w{i}", rank, op.k, n, "input") for i, n in enumerate(op.columns[rank])]
        self.y = [add(f"y{i}", rank, op.m, n, "output") for i, n in enumerate(op.columns[rank])]
        kind = "output" if op.gathered else "workspace"
        self.gathered = add("gathered", rank, op.m, op.k, kind)  # type: ignore[arg-type]
        self.relay = add(RELAY, rank, op.m, op.k, "workspace") if self.mates else None
        self.carried: dict[tuple[int, int], tuple[Region, int | None]] = {}
        self.arrived: list[tuple[int, int, int, Region, int | None]] = []

    def _far(self, carrier: int) -> list[int]:
        """The ranks on other machines whose shards the carrier pulls."""
        own = self.nodes.of[carrier]
        return [
            source
            for node in self.nodes.others(carrier)
            for source in self.nodes.members(node)
            if self.nodes.carrier(source, own) == carrier
        ]

    def carry(self) -> None:
        """Pulls the chunks that this rank carries for its machine over the network."""
        far = self._far(self.rank)
        for step in range(max((len(self.chunks[s]) for s in far), default=0)):
            for source in far:
                if step >= len(self.chunks[source]):
                    continue
                row, rows = self.chunks[source][step]
                into = self.relay or self.gathered
                there = into.rows_of(self.offsets[source] + row, rows)
                task = self._copy(
                    source, row, rows, Region(source, "x", row, rows, 0, self.op.k), there
                )
                self.carried[(source, step)] = (there, task)

    def gather(self, ranks: list[_TwoLevelGatherRank]) -> None:
        """Gathers what is on this machine or arrives there, the shards of its ranks first."""
        if self.serial or self.op.gathered:
            task = self._inside(self.rank, self.rank, 0, self.x.rows, self.x.all(), None)
            self.arrived.append((self.rank, 0, self.x.rows, self.x.all(), task))
        else:
            self.arrived.append((self.rank, 0, self.x.rows, self.x.all(), None))
        for mate in self.mates:
            for row, rows in self.chunks[mate]:
                shard = Region(mate, "x", row, rows, 0, self.op.k)
                task = self._inside(mate, mate, row, rows, shard, None)
                self._arrive(mate, row, rows, task)
        carriers = [self.rank, *self.mates]
        far = {carrier: self._far(carrier) for carrier in carriers}
        for step in range(max(map(len, self.chunks.values()))):
            for carrier in carriers:
                for source in far[carrier]:
                    if step < len(self.chunks[source]):
                        self._take(ranks[carrier], source, step)

    def _take(self, carrier: _TwoLevelGatherRank, source: int, step: int) -> None:
        row, rows = self.chunks[source][step]
        region, task = carrier.carried[(source, step)]
        mine = carrier.rank == self.rank
        if mine and self.relay is not None and not (self.serial or self.op.gathered):
            self.arrived.append((source, row, rows, region, task))
            return
        if not mine or self.relay is not None:
            task = self._inside(carrier.rank, source, row, rows, region, task)
        self._arrive(source, row, rows, task)

    def _arrive(self, source: int, row: int, rows: int, task: int | None) -> None:
        there = self.gathered.rows_of(self.offsets[source] + row, rows)
        self.arrived.append((source, row, rows, there, task))

    def _inside(
        self, peer: int, source: int, row: int, rows: int, region: Region, after: int | None
    ) -> int | None:
        there = self.gathered.rows_of(self.offsets[source] + row, rows)
        return self._copy(peer, row, rows, region, there, after, source)

    def _copy(
        self,
        peer: int,
        row: int,
        rows: int,
        source: Region,
        target: Region,
        after: int | None = None,
        shard: int | None = None,
    ) -> int | None:
        label = f"x{peer if shard is None else shard}[{row}:{row + rows}]"
        return self.builder.copy(self.rank, source, target, peer=peer, after=[after], label=label)

    def multiply(self) -> None:
        adaptive = self.builder.schedule.fusion == "adaptive"
        if self.serial:
            tasks = [task for *_, task in self.arrived]
            self._matmul(self.gathered.all(), 0, tasks, "all", None)
            return
        for number, (source, row, rows, region, task) in enumerate(self.arrived):
            a = self.x.all() if number == 0 else region
            label = "local shard" if number == 0 else f"x{source}[{row}:{row + rows}]"
            after = [] if number == 0 else [task]
            at = self.offsets[source] + row
            self._matmul(a, at, after, label, 0 if adaptive and number else None)

    def _matmul(
        self, a: Region, row: int, after: list[int | None], label: str, merge: int | None
    ) -> None:
        for i, (w, y) in enumerate(zip(self.w, self.y, strict=True)):
            self.builder.matmul(
                self.rank,
                a,
                w.all(),
                y.rows_of(row, a.rows),
                merge=None if merge is None else i,
                after=after,
                label=label if len(self.w) == 1 else f"{label} w{i}",
            )
