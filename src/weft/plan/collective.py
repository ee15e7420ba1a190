"""Collectives on copy engines as plans, one for each kind of command that copy engines have:

    pcpy   one copy per peer, each on an engine of its own
    bcst   one command writes the same bytes to two peers (all_gather, broadcast)
    swap   one command exchanges the bytes of a pair in place (all_to_all)
    b2b    all copies back to back on one engine, so that only one engine must be waited for

Each can be combined with *prelaunch* (`pcpy+prelaunch`): commands wait in their queues, and one
write releases them. Copy engines cannot add. So reduce_scatter is an all_to_all into an inbox, and
compute adds one chunk while later chunks are in flight. all_reduce also passes on every sum as soon
as it is computed.

These operations are not part of the operators' design space and are not registered: the variant is
the only choice. The host fabric runs collectives on its channel instead (`native/`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import ClassVar, Literal

from weft.errors import InvalidPlan, Unsupported, nearest
from weft.operation import ITEM_BYTES, split, starts
from weft.plan.builder import Builder
from weft.plan.contents import Contents, Data
from weft.plan.tasks import Buffer, Plan, Region
from weft.schedule import Schedule

Kind = Literal[
    "all_gather", "all_to_all", "reduce_scatter", "all_reduce", "broadcast", "gather", "scatter"
]
Command = Literal["pcpy", "bcst", "swap", "b2b"]

COMMANDS: dict[Kind, tuple[Command, ...]] = {
    "all_gather": ("pcpy", "bcst", "b2b"),
    "all_to_all": ("pcpy", "swap", "b2b"),
    "reduce_scatter": ("pcpy", "b2b"),
    "all_reduce": ("pcpy", "b2b"),
    "broadcast": ("pcpy", "bcst", "b2b"),
    "gather": ("pcpy", "b2b"),
    "scatter": ("pcpy", "b2b"),
}
"""The commands that each collective can use. Only equal bytes can be broadcast, and only the bytes
of a pair can be swapped."""

_NAME = re.compile(r"([a-z0-9]+)(\+prelaunch)?")
_ANYTHING = Schedule.parse("serial")


@dataclass(frozen=True, slots=True)
class Variant:
    """The commands that carry out a collective. Printed as a name such as `b2b+prelaunch`."""

    command: Command
    prelaunch: bool = False

    def __str__(self) -> str:
        return self.command + ("+prelaunch" if self.prelaunch else "")

    @classmethod
    def parse(cls, name: str) -> Variant:
        """The variant with that name."""
        match = _NAME.fullmatch(name.strip())
        known: tuple[Command, ...] = ("pcpy", "bcst", "swap", "b2b")
        for command in known:
            if match is not None and match[1] == command:
                return cls(command, match[2] is not None)
        raise Unsupported(
            f"there is no variant {name!r}{nearest(name, known)}; write one of "
            f"{', '.join(known)}, with +prelaunch if wanted"
        )


@dataclass(frozen=True)
class Collective:
    """A collective over the rows of a matrix.

    rows: per rank, the rows that it contributes (all_gather, gather) or keeps (reduce_scatter,
    all_reduce, scatter). For all_to_all, the rows of every pair at source * world + target. For
    broadcast, the rows of the root, repeated for every rank.
    """

    kind: Kind
    rows: tuple[int, ...]
    columns: int
    world: int
    dtype: str = "float32"
    root: int = 0

    name: ClassVar[str] = "collective"

    def __post_init__(self) -> None:
        if self.kind not in COMMANDS:
            raise Unsupported(f"there is no collective {self.kind!r}{nearest(self.kind, COMMANDS)}")
        wanted = self.world**2 if self.kind == "all_to_all" else self.world
        if len(self.rows) != wanted or min(self.rows, default=0) < 0:
            raise Unsupported(f"{self.kind} over {self.world} ranks takes {wanted} numbers of rows")
        if not 0 <= self.root < self.world:
            raise Unsupported(f"there is no rank {self.root} in a world of {self.world}")

    @classmethod
    def even(
        cls, kind: Kind, num_bytes: int, world: int, dtype: str = "float32", columns: int = 64
    ) -> Collective:
        """A collective of `num_bytes`, split evenly: the bytes of the gathered result, or of the
        input that is distributed."""
        rows = num_bytes // (columns * ITEM_BYTES[dtype])
        if kind == "all_to_all":
            own = split(rows, world)
            return cls(kind, tuple(own[t] for _ in range(world) for t in range(world)), columns,
                       world, dtype)  # fmt: skip
        if kind == "broadcast":
            return cls(kind, (rows,) * world, columns, world, dtype)
        return cls(kind, split(rows, world), columns, world, dtype)

    @property
    def label(self) -> str:
        total = sum(self.rows) if self.kind != "broadcast" else self.rows[self.root]
        return f"{self.kind} of {total}x{self.columns} {self.dtype} over {self.world} ranks"

    def num_flops(self, rank: int) -> int:
        return 0

    def num_bytes(self, source: int, target: int) -> int:
        """The bytes that must be sent from one rank to another."""
        if source == target:
            return 0
        row = self.columns * ITEM_BYTES[self.dtype]
        if self.kind == "all_to_all":
            return self.rows[source * self.world + target] * row
        if self.kind == "all_reduce":
            return (self.rows[target] + self.rows[source]) * row
        if self.kind == "reduce_scatter":
            return self.rows[target] * row
        if self.kind == "all_gather":
            return self.rows[source] * row
        if self.kind == "gather":
            return self.rows[source] * row if target == self.root else 0
        return self.rows[target] * row if source == self.root else 0

    def compute_only(self) -> Collective:
        kind: Kind = "all_gather"
        return Collective(kind, self.rows[:1], self.columns, 1, self.dtype)

    def lower(self, schedule: Schedule) -> Plan:
        """The plan of the simplest variant; the function `lower` below takes any variant."""
        return lower(self, Variant("pcpy", True))

    def check(self, plan: Plan, contents: Contents) -> None:
        _check(self, contents)


@lru_cache(maxsize=256)
def lower(operation: Collective, variant: Variant, chunks: int = 1) -> Plan:
    """The plan of all ranks. chunks: how many chunks a rank's rows are cut into where sums follow
    copies."""
    if variant.command not in COMMANDS[operation.kind]:
        raise Unsupported(
            f"{operation.kind} cannot be made of {variant.command}; it has "
            f"{', '.join(COMMANDS[operation.kind])}"
        )
    if chunks < 1:
        raise Unsupported(f"a collective cannot be cut into {chunks} chunks")
    lowering = _CollectiveLowering(operation, variant, chunks)
    getattr(lowering, operation.kind)()
    return lowering.builder.plan()


class _CollectiveLowering:
    """Lowers one collective. Every rank starts with a different peer, to spread the load."""

    def __init__(self, operation: Collective, variant: Variant, chunks: int) -> None:
        self.operation = operation
        self.variant = variant
        self.chunks = chunks
        self.world = operation.world
        self.builder = Builder(operation, _ANYTHING)

    # -- helpers -----------------------------------------------------------------------------------

    def buffers(self, name: str, kind: str, rows: int) -> list[Buffer]:
        return [
            self.builder.add_buffer(name, r, rows, self.operation.columns, kind)  # type: ignore[arg-type]
            for r in range(self.world)
        ]

    def peers(self, rank: int) -> list[int]:
        return [(rank + step) % self.world for step in range(1, self.world)]

    def lane(self, rank: int, peer: int) -> int:
        """The engine that serves a peer: one per peer, or one for all peers (b2b)."""
        return (rank + 1) % self.world if self.variant.command == "b2b" else peer

    def pull(
        self,
        rank: int,
        peer: int,
        source: Region,
        target: Region,
        label: str,
        after: Sequence[int | None] = (),
    ) -> int | None:
        return self.builder.copy(
            rank,
            source,
            target,
            peer=self.lane(rank, peer),
            prelaunched=self.variant.prelaunch,
            after=after,
            label=label,
        )

    def push_to_pairs(self, rank: int, source: Region, targets: list[Region]) -> None:
        """Writes to two peers with each command; the last command may have one peer."""
        for first in range(0, len(targets), 2):
            target, also = targets[first], targets[first + 1 : first + 2]
            self.builder.copy(
                rank,
                source,
                target,
                peer=target.rank,
                also=also,
                prelaunched=self.variant.prelaunch,
                label=f"broadcast to {', '.join(str(r.rank) for r in (target, *also))}",
            )

    # -- collectives -------------------------------------------------------------------------------

    def all_gather(self) -> None:
        rows = self.operation.rows
        begin = starts(rows)
        y = self.buffers("y", "inplace", sum(rows))
        for r in range(self.world):
            if self.variant.command == "bcst":
                block = y[r].rows_of(begin[r], rows[r])
                into = [y[p].rows_of(begin[r], rows[r]) for p in self.peers(r)]
                self.push_to_pairs(r, block, into)
                continue
            for p in self.peers(r):
                source, target = (y[rank].rows_of(begin[p], rows[p]) for rank in (p, r))
                self.pull(r, p, source, target, f"block {p}")

    def broadcast(self) -> None:
        rows, root = self.operation.rows[self.operation.root], self.operation.root
        y = self.buffers("y", "inplace", rows)
        if self.variant.command == "bcst":
            self.push_to_pairs(root, y[root].all(), [y[p].all() for p in self.peers(root)])
            return
        for p in self.peers(root):
            # The root pushes, so that back to back uses a single engine.
            self.builder.copy(
                root,
                y[root].all(),
                y[p].all(),
                peer=self.lane(root, p),
                prelaunched=self.variant.prelaunch,
                label=f"to {p}",
            )

    def gather(self) -> None:
        rows, root = self.operation.rows, self.operation.root
        begin = starts(rows)
        x = [
            self.builder.add_buffer("x", r, rows[r], self.operation.columns, "input")
            for r in range(self.world)
        ]
        y = self.builder.add_buffer("y", root, sum(rows), self.operation.columns, "output")
        for p in (root, *self.peers(root)):
            self.pull(root, p, x[p].all(), y.rows_of(begin[p], rows[p]), f"block {p}")

    def scatter(self) -> None:
        rows, root = self.operation.rows, self.operation.root
        begin = starts(rows)
        x = self.builder.add_buffer("x", root, sum(rows), self.operation.columns, "input")
        for p in (root, *self.peers(root)):
            y = self.builder.add_buffer("y", p, rows[p], self.operation.columns, "output")
            source = x.rows_of(begin[p], rows[p])
            self.builder.copy(
                root,
                source,
                y.all(),
                peer=self.lane(root, p),
                prelaunched=self.variant.prelaunch,
                label=f"block {p}",
            )

    def all_to_all(self) -> None:
        if self.variant.command == "swap":
            self._swap()
            return
        world = self.world
        sent = [self.operation.rows[s * world : (s + 1) * world] for s in range(world)]
        got = [tuple(sent[s][t] for s in range(world)) for t in range(world)]
        add, columns = self.builder.add_buffer, self.operation.columns
        x = [add("x", r, sum(sent[r]), columns, "input") for r in range(world)]
        y = [add("y", r, sum(got[r]), columns, "output") for r in range(world)]
        for r in range(world):
            for p in (*self.peers(r), r):
                source = x[p].rows_of(starts(sent[p])[r], sent[p][r])
                self.pull(r, p, source, y[r].rows_of(starts(got[r])[p], got[r][p]), f"block {p}")

    def _swap(self) -> None:
        world, rows = self.world, self.operation.rows
        pairs = [(s * world + t, t * world + s) for s in range(world) for t in range(s)]
        if any(rows[there] != rows[back] for there, back in pairs):
            raise Unsupported("a swap needs as many rows to a peer as come from it")
        sent = [rows[s * world : (s + 1) * world] for s in range(world)]
        y = [
            self.builder.add_buffer("y", r, sum(sent[r]), self.operation.columns, "inplace")
            for r in range(world)
        ]
        for r in range(world):
            for step in range(1, world // 2 + 1):
                p = (r + step) % world
                if 2 * step == world and r > p:
                    continue  # the other rank of the pair issues the command
                mine = y[r].rows_of(starts(sent[r])[p], sent[r][p])
                theirs = y[p].rows_of(starts(sent[p])[r], sent[p][r])
                self.builder.copy(
                    r,
                    mine,
                    theirs,
                    peer=p,
                    swaps=True,
                    prelaunched=self.variant.prelaunch,
                    label=f"swap with {p}",
                )

    def reduce_scatter(self) -> None:
        self._sums(passed_on=False)

    def all_reduce(self) -> None:
        self._sums(passed_on=True)

    def _sums(self, passed_on: bool) -> None:
        rows, world = self.operation.rows, self.world
        begin, total = starts(rows), sum(rows)
        add, columns = self.builder.add_buffer, self.operation.columns
        x = self.buffers("x", "input", total)
        # Peers read sums from workspace, because an output may be in private memory.
        inbox = [add("inbox", r, rows[r] * (world - 1), columns, "workspace") for r in range(world)]
        y = [add("y", r, total if passed_on else rows[r], columns, "output") for r in range(world)]
        sums = (
            [add("sums", r, rows[r], columns, "workspace") for r in range(world)]
            if passed_on
            else y
        )
        made: dict[tuple[int, int], int | None] = {}
        for r in range(world):
            sizes = split(rows[r], self.chunks)
            for number, (at, size) in enumerate(zip(starts(sizes), sizes, strict=True)):
                terms, fetched = {r: x[r].rows_of(begin[r] + at, size)}, []
                for slot, p in enumerate(self.peers(r)):
                    target = inbox[r].rows_of(slot * rows[r] + at, size)
                    source = x[p].rows_of(begin[r] + at, size)
                    fetched.append(self.pull(r, p, source, target, f"chunk {number} of {p}"))
                    terms[p] = target
                into = [sums[r].rows_of(at, size)]
                if passed_on:
                    into.append(y[r].rows_of(begin[r] + at, size))
                made[r, number] = self.builder.reduce(
                    r,
                    [terms[p] for p in range(world)],
                    into,
                    after=fetched,
                    label=f"sum of chunk {number}",
                )
        if not passed_on:
            return
        for r in range(world):
            for p in self.peers(r):
                sizes = split(rows[p], self.chunks)
                for number, (at, size) in enumerate(zip(starts(sizes), sizes, strict=True)):
                    source = sums[p].rows_of(at, size)
                    target = y[r].rows_of(begin[p] + at, size)
                    label = f"sum {number} of {p}"
                    self.pull(r, p, source, target, label, [made[p, number]])


# -- checks of the result --------------------------------------------------------------------------


def _check(operation: Collective, contents: Contents) -> None:
    world, rows = operation.world, operation.rows
    begin = starts(rows)
    for r in range(world):
        if operation.kind == "all_gather":
            for p in range(world):
                _holds(contents, r, begin[p], rows[p], [((p, "y"), begin[p])])
        elif operation.kind == "broadcast":
            _holds(contents, r, 0, rows[operation.root], [((operation.root, "y"), 0)])
        elif operation.kind == "gather":
            if r == operation.root:
                for p in range(world):
                    _holds(contents, r, begin[p], rows[p], [((p, "x"), 0)])
        elif operation.kind == "scatter":
            _holds(contents, r, 0, rows[r], [((operation.root, "x"), begin[r])])
        elif operation.kind == "reduce_scatter":
            _holds(contents, r, 0, rows[r], [((p, "x"), begin[r]) for p in range(world)])
        elif operation.kind == "all_reduce":
            _holds(contents, r, 0, sum(rows), [((p, "x"), 0) for p in range(world)])
        else:
            _check_exchanged(operation, contents, r)


def _check_exchanged(operation: Collective, contents: Contents, rank: int) -> None:
    world = operation.world
    sent = [operation.rows[s * world : (s + 1) * world] for s in range(world)]
    got = [sent[s][rank] for s in range(world)]
    for p in range(world):
        holdings = contents.of(rank, "y")
        named = (
            holdings[0].value.buffer[1] if holdings and isinstance(holdings[0].value, Data) else "x"
        )
        wanted = [((p, named), starts(sent[p])[rank])]
        _holds(contents, rank, starts(got)[p], got[p], wanted)


def _holds(
    contents: Contents, rank: int, row: int, rows: int, wanted: list[tuple[tuple[int, str], int]]
) -> None:
    """Raises unless rows of a rank's result are the sum of the wanted rows, and nothing else."""
    holdings = [
        held
        for held in contents.of(rank, "y")
        if held.row < row + rows and row < held.row + held.rows
    ]
    edges = {row, row + rows}
    for held in holdings:
        edges |= {max(row, held.row), min(row + rows, held.row + held.rows)}
    cuts = sorted(edges)
    for top, bottom in pairwise(cuts):  # no held rectangle starts or ends inside
        found = []
        for held in holdings:
            if held.row <= top and bottom <= held.row + held.rows:
                if not isinstance(held.value, Data):
                    raise InvalidPlan(f"rank {rank} has a product where a collective only adds")
                found.append((held.value.buffer, held.value.row + top - held.row))
        expected = sorted((buffer, first + top - row) for buffer, first in wanted)
        if sorted(found) != expected:
            raise InvalidPlan(
                f"rows {top}:{bottom} of rank {rank}'s result hold {found}, not {expected}"
            )
