"""Multiply, then reduce-scatter, on two levels: the sum of a machine crosses the network once.

The ranks of a machine compute their shares of a chunk for an owner on another machine at the same
time. One of them, the carrier of the chunk, copies the other shares through shared memory and adds
them, and the owner pulls the sum. The owner adds the sums of the other machines and the shares of
its own machine, in the order of ranks. For 2 machines of 2 ranks, rank 0 carries for rank 2:

    rank 0   compute | y2.0 y3.0 | y2.1 y3.1 |+| y1 |+| y0.0 + y0.1 + |
             inside        | y2.0 of 1 | y2.1 of 1 |
             network                  | y0.0 of 2,3 | y0.1 of 2,3 |

The sums of machines have the operation's dtype. With half precision they would be rounded once more
than promised, so the flat plan is used there.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from weft.operation import starts
from weft.plan.builder import Builder
from weft.plan.gathering import HALF
from weft.plan.matmul_reduce_scatter import MatmulReduceScatter
from weft.plan.nodes import Nodes
from weft.plan.order import slices
from weft.plan.scattering import default_depth
from weft.plan.tasks import Plan, Region
from weft.schedule import Schedule


class _Share(NamedTuple):
    """A rank's share of a chunk: its region, and the task that writes it."""

    region: Region
    task: int | None


def possible(operation: MatmulReduceScatter, schedule: Schedule) -> bool:
    """Whether there is a two-level plan for an operation and a schedule."""
    cut = not schedule.serial and schedule.fusion in ("unfused", "adaptive")
    rows = schedule.cut == "rows" and schedule.pattern == "all" and schedule.start == "local"
    return cut and rows and operation.dtype not in HALF


@lru_cache(maxsize=64)
def lower(operation: MatmulReduceScatter, schedule: Schedule, nodes: Nodes) -> Plan:
    """The plan of all ranks."""
    depth = default_depth(operation, schedule) if schedule.depth is None else schedule.depth
    builder = Builder(operation, schedule)
    ranks = [
        _TwoLevelScatterRank(builder, operation, rank, depth, nodes)
        for rank in range(len(nodes.of))
    ]
    # All ranks step by step, so that a copy exists before the sum that depends on it is added.
    for step in range(max(depth, 1) + 1):
        for rank in ranks:
            rank.make_far(step)
        for rank in ranks:
            rank.add_for_far(ranks, step - 1)
    for rank in ranks:
        rank.make_near()
    for rank in ranks:
        rank.complete(ranks)
    return builder.plan()


class _TwoLevelScatterRank:
    """Lowers the tasks of one rank."""

    def __init__(
        self, builder: Builder, op: MatmulReduceScatter, rank: int, depth: int, nodes: Nodes
    ) -> None:
        self.builder, self.op, self.rank, self.nodes = builder, op, rank, nodes
        self.adaptive = builder.schedule.fusion == "adaptive"
        self.node = nodes.of[rank]
        self.mates = nodes.mates(rank)
        self.first = starts(op.rows)
        self.cuts = [slices(rows, max(depth, 1)) for rows in op.rows]
        # The same order on all ranks of a machine: they compute the shares of a chunk together.
        self.far = [o for node in nodes.others(rank) for o in nodes.members(node)]
        carried = [o for o in self.far if nodes.carrier(o, self.node) == rank]
        add, own = builder.add_buffer, op.rows[rank]
        self.x = add("x", rank, op.m, op.inner[rank], "input")
        self.w = add("w", rank, op.inner[rank], op.n, "input")
        self.y = add("y", rank, own, op.n, "output")
        self.partial = add("partial", rank, op.m, op.n, "workspace")
        self.shares = add(
            "shares", rank, sum(op.rows[o] for o in carried) * len(self.mates), op.n, "workspace"
        )
        self.sums = add("sums", rank, sum(op.rows[o] for o in carried), op.n, "workspace")
        boxes = len(self.mates) + len(nodes.numbers) - 1
        self.inbox = add("inbox", rank, own * boxes, op.n, "workspace")
        self.carried = carried
        self.sum_first = dict(zip(carried, starts([op.rows[o] for o in carried]), strict=True))
        self.made: dict[tuple[int, int], _Share] = {}
        self.summed: dict[tuple[int, int], _Share] = {}

    def make_far(self, step: int) -> None:
        """Computes this rank's shares of a step's chunks for owners on other machines."""
        for owner in self.far:
            if step < len(self.cuts[owner]):
                row, rows = self.cuts[owner][step]
                self._multiply(owner, step, row, rows)

    def add_for_far(self, ranks: list[_TwoLevelScatterRank], step: int) -> None:
        """Adds the machine's shares of the chunks that this rank carries in a step."""
        for owner in self.carried:
            if not 0 <= step < len(self.cuts[owner]):
                continue
            row, rows = self.cuts[owner][step]
            sources = {self.rank: self.made[(owner, step)]}
            base = self.sum_first[owner] * len(self.mates) + row
            for number, mate in enumerate(self.mates):
                there = self.shares.rows_of(base + number * self.op.rows[owner], rows)
                label = f"y{owner}[{row}:{row + rows}] of {mate}"
                sources[mate] = self._fetch(mate, ranks[mate].made[(owner, step)], there, label)
            ordered = [sources[rank] for rank in sorted(sources)]
            total = self.sums.rows_of(self.sum_first[owner] + row, rows)
            label = f"sum for {owner} [{row}:{row + rows}]"
            task = self._reduce(ordered, total, label, early=False)
            self.summed[(owner, step)] = _Share(total, task)

    def make_near(self) -> None:
        """Computes this rank's shares of the chunks for ranks on its machine."""
        for step in range(max((len(self.cuts[mate]) for mate in self.mates), default=0)):
            for mate in self.mates:
                if step < len(self.cuts[mate]):
                    self._multiply(mate, step, *self.cuts[mate][step])

    def complete(self, ranks: list[_TwoLevelScatterRank]) -> None:
        """Pulls what others computed for this rank, computes its own shares, and adds all."""
        arrived = [self._arrived(ranks, step) for step in range(len(self.cuts[self.rank]))]
        if not self.op.rows[self.rank]:
            return
        for step, (row, rows) in enumerate(self.cuts[self.rank]):
            merge = step if self.adaptive else None
            self._multiply(self.rank, step, row, rows, merge)
        for step, (row, rows) in enumerate(self.cuts[self.rank]):
            sources: list[_Share] = []
            for node in self.nodes.numbers:
                if node != self.node:
                    sources.append(arrived[step][self.nodes.carrier(self.rank, node)])
                    continue
                for rank in self.nodes.members(node):
                    own = rank == self.rank
                    sources.append(self.made[(rank, step)] if own else arrived[step][rank])
            label = f"sum [{row}:{row + rows}]"
            self._reduce(sources, self.y.rows_of(row, rows), label, early=self.adaptive)

    def _arrived(self, ranks: list[_TwoLevelScatterRank], step: int) -> dict[int, _Share]:
        """The shares of this rank's chunk in a step: one per rank of its machine, and one sum per
        other machine."""
        row, rows = self.cuts[self.rank][step]
        carriers = [self.nodes.carrier(self.rank, node) for node in self.nodes.others(self.rank)]
        found: dict[int, _Share] = {}
        for box, source in enumerate([*carriers, *self.mates]):
            there = self.inbox.rows_of(box * self.op.rows[self.rank] + row, rows)
            if not rows:
                continue
            shares = ranks[source].summed if source in carriers else ranks[source].made
            label = f"y{self.rank} of {source} [{row}:{row + rows}]"
            found[source] = self._fetch(source, shares[(self.rank, step)], there, label)
        return found

    def _multiply(
        self, owner: int, step: int, row: int, rows: int, merge: int | None = None
    ) -> None:
        at = self.first[owner] + row
        region = self.partial.rows_of(at, rows)
        label = f"y{owner}[{row}:{row + rows}]"
        task = self.builder.matmul(
            self.rank, self.x.rows_of(at, rows), self.w.all(), region, merge=merge, label=label
        )
        self.made[(owner, step)] = _Share(region, task)

    def _fetch(self, peer: int, share: _Share, there: Region, label: str) -> _Share:
        task = self.builder.copy(
            self.rank, share.region, there, peer=peer, after=[share.task], label=label
        )
        return _Share(there, task)

    def _reduce(self, sources: list[_Share], into: Region, label: str, early: bool) -> int | None:
        return self.builder.reduce(
            self.rank,
            [share.region for share in sources],
            [into],
            early=early,
            after=[share.task for share in sources],
            label=label,
        )
