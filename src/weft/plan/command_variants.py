"""Collectives by copy engines as plans, in the command variants that such engines have.

    pcpy   a copy per peer, each on an engine of its own
    bcst   one command brings the same bytes to two peers (all_gather, broadcast)
    swap   one command exchanges the bytes of a pair, in place (all_to_all)
    b2b    all copies back to back on one engine, so that there is one to wait for
    pull   a copy per peer, fetched into a result that no peer touches (the device fabric's way)

Each has a form with *prelaunch* (`pcpy+prelaunch`): the commands wait in their queues, and one
write releases them. Engines cannot add, so a reduce_scatter is an all_to_all into an inbox, and the
compute lane adds chunk after chunk while later chunks fly; an all_reduce passes every sum on as
soon as it is made.

These plans are not part of the operators' design space, so they are not registered: the variant is
all there is to choose. The host fabric carries collectives out by its channel (`native/`), a device
by `pull`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

from weft.errors import Unsupported
from weft.operation import split, starts
from weft.plan.builder import Builder
from weft.plan.collective import Collective
from weft.plan.collective_contents import check_collective
from weft.plan.contents import Contents
from weft.plan.tasks import Buffer, BufferKind, Plan, Region
from weft.schedule import Schedule

Command = Literal["pcpy", "bcst", "swap", "b2b", "pull"]

COMMANDS: dict[str, tuple[Command, ...]] = {
    "all_gather": ("pcpy", "bcst", "b2b"),
    "all_to_all": ("pcpy", "swap", "b2b"),
    "reduce_scatter": ("pcpy", "b2b"),
    "all_reduce": ("pcpy", "b2b"),
    "broadcast": ("pcpy", "bcst", "b2b"),
    "gather": ("pcpy", "b2b"),
    "scatter": ("pcpy", "b2b"),
}
"""What each collective can be made of: equal bytes can be broadcast, a pair's can be swapped."""

_ANYTHING = Schedule.parse("serial")


@dataclass(frozen=True, slots=True)
class Variant:
    """How a collective is commanded. Prints as a name such as `b2b+prelaunch`."""

    command: Command
    prelaunch: bool = False

    def __str__(self) -> str:
        return self.command + ("+prelaunch" if self.prelaunch else "")


VARIANTS: tuple[Variant, ...] = tuple(
    Variant(command, prelaunch)
    for command in ("pcpy", "bcst", "swap", "b2b")
    for prelaunch in (False, True)
)


PULL = Variant("pull", prelaunch=True)
"""How a device carries out collectives. It is not compared with the others, which name commands."""


@dataclass(frozen=True)
class CommandedCollective:
    """A collective that copy engines carry out in one variant. chunks: into how many each part is
    cut where sums follow copies."""

    collective: Collective
    variant: Variant
    chunks: int = 1

    name: ClassVar[str] = "commanded_collective"

    def __post_init__(self) -> None:
        reason = refuses(self.collective, self.variant)
        if reason is not None:
            raise Unsupported(reason)
        if self.chunks < 1:
            raise Unsupported(f"a collective cannot be cut into {self.chunks} chunks")

    @property
    def routed(self) -> bool:
        """Whether the sizes of single ranks may change between calls."""
        return len(set(self.collective.sizes)) > 1 or self.collective.kind == "all_to_all"

    @property
    def dtype(self) -> str:
        return self.collective.dtype

    @property
    def world(self) -> int:
        return self.collective.world

    @property
    def label(self) -> str:
        return f"{self.collective.label} by {self.variant}"

    def num_flops(self, rank: int) -> int:
        return 0

    def num_bytes(self, source: int, target: int) -> int:
        return self.collective.num_bytes(source, target)

    def compute_only(self) -> Collective:
        return self.collective.compute_only()

    def lower(self, schedule: Any = None) -> Plan:
        """The plan of all ranks; the variant leaves nothing for a schedule to choose."""
        return _lower(self)

    def check(self, plan: Plan, contents: Contents) -> None:
        check_collective(self.collective, contents, self.variant.command == "pull")


def refuses(collective: Collective, variant: Variant) -> str | None:
    """Why a collective cannot be carried out in a variant, or None if it can."""
    commands = COMMANDS.get(collective.kind, ())
    if not commands:
        return f"copy engines have no commands for {collective.kind}"
    if variant.command not in (*commands, "pull"):
        return (
            f"{collective.kind} cannot be made of {variant.command}; it has {', '.join(commands)}"
        )
    if variant.command == "swap":
        sent = [collective.sent(rank) for rank in range(collective.world)]
        pairs = [(s, t) for s in range(collective.world) for t in range(s)]
        if any(sent[s][t] != sent[t][s] for s, t in pairs):
            return "a swap needs as many elements to a peer as come from it"
    return None


@lru_cache(maxsize=256)
def _lower(commanded: CommandedCollective) -> Plan:
    lowering = _VariantLowering(commanded)
    getattr(lowering, commanded.collective.kind)()
    return lowering.builder.plan()


class _VariantLowering:
    """Lowers one collective. Every rank begins with the next one, so that no two ranks begin with
    the same peer."""

    def __init__(self, commanded: CommandedCollective) -> None:
        self.operation = commanded.collective
        self.sizes = commanded.collective.sizes
        self.root = commanded.collective.root
        self.variant = commanded.variant
        self.chunks = commanded.chunks
        self.world = commanded.world
        self.builder = Builder(commanded, _ANYTHING)

    # -- parts -------------------------------------------------------------------------------------

    def buffer(self, name: str, rank: int, size: int, kind: BufferKind) -> Buffer:
        """A buffer of one column, with an element in each row."""
        return self.builder.add_buffer(name, rank, size, 1, kind)

    def buffers(self, name: str, sizes: Sequence[int], kind: BufferKind) -> list[Buffer]:
        """One buffer per rank."""
        return [self.buffer(name, rank, size, kind) for rank, size in enumerate(sizes)]

    def peers(self, rank: int) -> list[int]:
        return [(rank + step) % self.world for step in range(1, self.world)]

    def copy(
        self,
        rank: int,
        peer: int,
        source: Region,
        target: Region,
        label: str,
        after: Sequence[int | None] = (),
    ) -> int | None:
        """A command of a rank, on its engine for that peer or, back to back, on one for all."""
        one_engine = self.variant.command == "b2b"
        return self.builder.copy(
            rank,
            source,
            target,
            peer=(rank + 1) % self.world if one_engine else peer,
            prelaunched=self.variant.prelaunch,
            after=after,
            label=label,
        )

    def push_to_pairs(self, rank: int, source: Region, targets: list[Region]) -> None:
        """One command for two peers each; the last may have one."""
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
        sizes, begin = self.sizes, starts(self.sizes)
        if self.variant.command == "pull":
            x = self.buffers("x", sizes, "input")
            for r in range(self.world):
                y_of = self.buffer("y", r, sum(sizes), "output")
                for p in (r, *self.peers(r)):
                    self.copy(r, p, x[p].all(), y_of.rows_of(begin[p], sizes[p]), f"block {p}")
            return
        y = self.buffers("y", [sum(sizes)] * self.world, "inplace")
        for r in range(self.world):
            if self.variant.command == "bcst":
                block = y[r].rows_of(begin[r], sizes[r])
                into = [y[p].rows_of(begin[r], sizes[r]) for p in self.peers(r)]
                self.push_to_pairs(r, block, into)
                continue
            for p in self.peers(r):
                source, target = (y[rank].rows_of(begin[p], sizes[p]) for rank in (p, r))
                self.copy(r, p, source, target, f"block {p}")

    def broadcast(self) -> None:
        root = self.root
        if self.variant.command == "pull":
            x = self.buffer("x", root, sum(self.sizes), "input")
            for r in range(self.world):
                target = self.buffer("y", r, sum(self.sizes), "output").all()
                self.copy(r, root, x.all(), target, "whole")
            return
        y = self.buffers("y", [sum(self.sizes)] * self.world, "inplace")
        if self.variant.command == "bcst":
            self.push_to_pairs(root, y[root].all(), [y[p].all() for p in self.peers(root)])
            return
        for p in self.peers(root):  # by the root, so that back to back is one engine for all
            self.copy(root, p, y[root].all(), y[p].all(), f"to {p}")

    def gather(self) -> None:
        sizes, begin, root = self.sizes, starts(self.sizes), self.root
        x = self.buffers("x", sizes, "input")
        y = self.buffer("y", root, sum(sizes), "output")
        for p in (root, *self.peers(root)):
            self.copy(root, p, x[p].all(), y.rows_of(begin[p], sizes[p]), f"block {p}")

    def scatter(self) -> None:
        sizes, begin, root = self.sizes, starts(self.sizes), self.root
        x = self.buffer("x", root, sum(sizes), "input")
        for p in (root, *self.peers(root)):
            y = self.buffer("y", p, sizes[p], "output")
            at, to = (p, root) if self.variant.command == "pull" else (root, p)
            self.copy(at, to, x.rows_of(begin[p], sizes[p]), y.all(), f"block {p}")

    def all_to_all(self) -> None:
        world = self.world
        sent = [self.operation.sent(rank) for rank in range(world)]
        if self.variant.command == "swap":
            self._swap(sent)
            return
        got = [tuple(sent[s][t] for s in range(world)) for t in range(world)]
        x = self.buffers("x", [sum(sizes) for sizes in sent], "input")
        y = self.buffers("y", [sum(sizes) for sizes in got], "output")
        for r in range(world):
            for p in (*self.peers(r), r):
                source = x[p].rows_of(starts(sent[p])[r], sent[p][r])
                self.copy(r, p, source, y[r].rows_of(starts(got[r])[p], got[r][p]), f"block {p}")

    def _swap(self, sent: Sequence[Sequence[int]]) -> None:
        world = self.world
        y = self.buffers("y", [sum(sizes) for sizes in sent], "inplace")
        for r in range(world):
            for step in range(1, world // 2 + 1):
                p = (r + step) % world
                if 2 * step == world and r > p:
                    continue  # the pair's other rank commands it
                self.builder.copy(
                    r,
                    y[r].rows_of(starts(sent[r])[p], sent[r][p]),
                    y[p].rows_of(starts(sent[p])[r], sent[p][r]),
                    peer=p,
                    swaps=True,
                    prelaunched=self.variant.prelaunch,
                    label=f"swap with {p}",
                )

    def reduce_scatter(self) -> None:
        y = self.buffers("y", self.sizes, "output")
        self._sums([[y[rank].all()] for rank in range(self.world)])

    def all_reduce(self) -> None:
        sizes, begin = self.sizes, starts(self.sizes)
        y = self.buffers("y", [sum(sizes)] * self.world, "output")
        # What peers pass on is read from workspace: an output may be private memory.
        sums = self.buffers("sums", sizes, "workspace")
        own = [y[rank].rows_of(begin[rank], sizes[rank]) for rank in range(self.world)]
        made = self._sums([[sums[rank].all(), own[rank]] for rank in range(self.world)])
        for r in range(self.world):
            for p in self.peers(r):
                for number, (at, size) in enumerate(self._cut(p)):
                    source, target = sums[p].rows_of(at, size), y[r].rows_of(begin[p] + at, size)
                    self.copy(r, p, source, target, f"sum {number} of {p}", [made[p, number]])

    def _cut(self, rank: int) -> list[tuple[int, int]]:
        """(first element, elements) of the chunks of a rank's part."""
        cut = split(self.sizes[rank], self.chunks)
        return list(zip(starts(cut), cut, strict=True))

    def _sums(self, into: Sequence[Sequence[Region]]) -> dict[tuple[int, int], int | None]:
        """Every rank fetches its part of all inputs and adds it chunk by chunk, into its regions of
        that size. Gives the task of each sum, by rank and chunk."""
        sizes, world, begin = self.sizes, self.world, starts(self.sizes)
        x = self.buffers("x", [sum(sizes)] * world, "input")
        inbox = self.buffers("inbox", [size * (world - 1) for size in sizes], "workspace")
        made: dict[tuple[int, int], int | None] = {}
        for r in range(world):
            for number, (at, size) in enumerate(self._cut(r)):
                terms, fetched = {r: x[r].rows_of(begin[r] + at, size)}, []
                for slot, p in enumerate(self.peers(r)):
                    terms[p] = inbox[r].rows_of(slot * sizes[r] + at, size)
                    source = x[p].rows_of(begin[r] + at, size)
                    fetched.append(self.copy(r, p, source, terms[p], f"chunk {number} of {p}"))
                made[r, number] = self.builder.reduce(
                    r,
                    [terms[p] for p in range(world)],
                    [region._replace(row=region.row + at, rows=size) for region in into[r]],
                    after=fetched,
                    label=f"sum of chunk {number}",
                )
        return made
