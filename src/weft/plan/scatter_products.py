"""The first half of an operation that multiplies and then sends (`plan/scattering.py`): the GEMMs
of one rank, cut and ordered by the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from weft.operation import result_dtype, starts
from weft.plan.blocks import Block, Taper, cut_blocks, growing_blocks
from weft.plan.builder import Builder
from weft.plan.order import slices
from weft.plan.tasks import Plannable, Region


class Scattering(Plannable, Protocol):
    """An operation that multiplies and then sends rows of the product to their owners."""

    @property
    def n(self) -> int: ...

    @property
    def inner(self) -> tuple[int, ...]:
        """The K of every rank."""
        ...

    @property
    def summed(self) -> bool:
        """Whether an owner adds what it receives from all ranks; otherwise it keeps every row."""
        ...

    @property
    def everywhere(self) -> bool:
        """Whether every rank needs the sums of all owners."""
        ...

    def sizes(self, maker: int) -> Sequence[int]:
        """The rows of a rank's product that go to each owner, in row order."""
        ...


def taper_of(operation: Scattering) -> Taper:
    """Which chunks of the products are cut finer under adaptive."""
    return "closing" if operation.everywhere else "opening"


class Made(NamedTuple):
    """A block of the product for one owner: its rows and columns, its region, and its task."""

    row: int
    rows: int
    column: int
    columns: int
    region: Region
    task: int | None


class Products:
    """The buffers of one rank, and the GEMMs that compute its products."""

    def __init__(
        self, builder: Builder, op: Scattering, rank: int, depth: int, growing: bool
    ) -> None:
        self.builder, self.op, self.rank, self.depth = builder, op, rank, depth
        self.growing = growing
        self.schedule = builder.schedule
        self.direct = self.schedule.engine == "direct"
        self.adaptive = self.schedule.fusion == "adaptive"
        self.hetero = self.schedule.start == "local" and not self.schedule.serial
        self.rows = list(op.sizes(rank))
        self.first = starts(self.rows)
        self.received = [op.sizes(maker)[rank] for maker in range(op.world)]
        self.places = starts(self.received)
        after = [(rank + step) % op.world for step in range(1, op.world)]
        self.owners = after if self.hetero else [*after, rank]
        self.makers = after[::-1]
        self.made: dict[int, list[Made]] = {owner: [] for owner in range(op.world)}
        self.interleaved = self.adaptive and self.hetero and op.everywhere and not self.direct
        self._multiplied: int | None = None
        self._num_made = 0
        self.base = 0
        """The rows of `partial` that fused steps have filled."""
        self._buffers()

    def _buffers(self) -> None:
        op, rank, add = self.op, self.rank, self.builder.add_buffer
        own, made, result = self.rows[rank], sum(self.rows), result_dtype(op)
        kept = made if op.everywhere else own if op.summed else sum(self.received)
        self.x = add("x", rank, made, op.inner[rank], "input")
        self.w = add("w", rank, op.inner[rank], op.n, "input")
        self.y = add("y", rank, kept, op.n, "output", result)
        if op.world == 1:
            return
        if not self.direct:
            self.partial = add("partial", rank, made, op.n, "workspace", result)
            if op.summed:
                self.inbox = add("inbox", rank, own * (op.world - 1), op.n, "workspace", result)
        else:
            if op.summed:
                self.partial = add("partial", rank, own, op.n, "workspace", result)
            boxed = own * (op.world - 1) if op.summed else kept
            self.inbox = add("inbox", rank, boxed, op.n, "workspace", result)
        if op.everywhere:
            self.reduced = add("reduced", rank, own, op.n, "workspace", result)

    def alone(self) -> None:
        self.builder.matmul(self.rank, self.x.all(), self.w.all(), self.y.all(), label="all")

    def make(self) -> None:
        """Computes the products of the peers and, with a uniform start, of this rank."""
        if self.schedule.serial:
            self._multiply_span(0, sum(self.rows), 0, self.op.n, "all")
        elif self.schedule.cut == "columns":
            for column, columns in slices(self.op.n, self.depth):
                for row, rows in self._row_spans():
                    label = f"columns {column}:{column + columns}"
                    self._multiply_span(row, rows, column, columns, label)
        elif self.schedule.fusion == "fused":
            self._fused()
        else:
            for owner, block in self._chunks():
                self.multiply_chunk(owner, block)

    @property
    def num_steps(self) -> int:
        return max((len(self.blocks(owner)) for owner in range(self.op.world)), default=0)

    def make_step(self, step: int) -> None:
        """Computes this step's chunks of all peers, and the previous step's chunk of this rank."""
        for owner in [*self.owners, self.rank]:
            blocks, number = self.blocks(owner), step - (owner == self.rank)
            if 0 <= number < len(blocks):
                # Loose tasks, so that sums may run between them. Each follows the last product.
                self.multiply_chunk(owner, blocks[number], merge=self._num_made)
                self._num_made += 1

    def _row_spans(self) -> list[tuple[int, int]]:
        """(first row, rows) of the GEMMs of a step when columns are cut."""
        if self.schedule.fusion != "fused":
            return [(self.first[owner], self.rows[owner]) for owner in self.owners]
        if not self.hetero:
            return [(0, sum(self.rows))]
        end = self.first[self.rank] + self.rows[self.rank]
        return [(end, sum(self.rows) - end), (0, self.first[self.rank])]

    def _multiply_span(self, row: int, rows: int, column: int, columns: int, label: str) -> None:
        """One GEMM over adjacent rows of several owners."""
        region = Region(self.rank, "partial", row, rows, column, columns)
        task = self.matmul(self.x.rows_of(row, rows), column, columns, region, label)
        for owner, (first, size) in enumerate(zip(self.first, self.rows, strict=True)):
            if row <= first and first + size <= row + rows and size:
                part = Region(self.rank, "partial", first, size, column, columns)
                self.made[owner].append(Made(0, size, column, columns, part, task))

    def multiply_chunk(self, owner: int, block: Block, merge: int | None = None) -> None:
        """One GEMM over a chunk of one owner, written to its final place if possible."""
        row, rows, column, columns = block
        rank, at, where = self.rank, self.first[owner] + row, "partial"
        if owner == rank and not self.op.summed:
            at, where = self.places[owner] + row, "y"
        elif owner == rank and self.direct:
            at = row
        elif self.direct:
            rank, at, where = owner, self.box(self.rank, owner) + row, "inbox"
        region = Region(rank, where, at, rows, column, columns)
        a = self.x.rows_of(self.first[owner] + row, rows)
        label = f"y{owner}[{row}:{row + rows}]"
        if columns < self.op.n:
            label += f"[{column}:{column + columns}]"
        after = self._multiplied if self.interleaved else None
        task = self.matmul(a, column, columns, region, label, merge=merge, after=after)
        self._multiplied = task if task is not None else self._multiplied
        self.made[owner].append(Made(*block, region, task))

    def whole(self, owner: int) -> Block:
        return 0, self.rows[owner], 0, self.op.n

    def _fused(self) -> None:
        """One GEMM per step over the chunks of all owners, which are packed into one buffer."""
        base, packed = 0, None
        for number, step in enumerate(self._steps()):
            sizes = [block[1] for _, block in step]
            rows = sum(sizes)
            at = [self.first[owner] + block[0] for owner, block in step]
            ends = [a + size for a, size in zip(at, sizes, strict=True)]
            if at[1:] == ends[:-1]:
                a, after = self.x.rows_of(at[0], rows), None
            else:
                if packed is None:
                    packed = self.builder.add_buffer(
                        "packed", self.rank, sum(self.rows), self.x.columns, "workspace"
                    )
                a, moves, here = packed.rows_of(base, rows), [], base
                for start, size in zip(at, sizes, strict=True):
                    moves.append((self.x.rows_of(start, size), packed.rows_of(here, size)))
                    here += size
                after = self.builder.permute(self.rank, moves, label=f"gather {number}")
            region = self.partial.rows_of(base, rows)
            task = self.matmul(a, 0, self.op.n, region, f"step {number}", after=after)
            for owner, block in step:
                part = self.partial.rows_of(base, block[1])
                self.made[owner].append(Made(*block, part, task))
                base += block[1]
        self.base = base

    def _steps(self) -> list[list[tuple[int, Block]]]:
        """(owner, block of its rows) of the chunks of every step."""
        cuts = [[(owner, block) for block in self.blocks(owner)] for owner in self.owners]
        longest = max(map(len, cuts), default=0)
        return [[cut[i] for cut in cuts if i < len(cut)] for i in range(longest)]

    def _chunks(self) -> list[tuple[int, Block]]:
        if self.schedule.pattern == "all":
            return [chunk for step in self._steps() for chunk in step]
        return [(owner, block) for owner in self.owners for block in self.blocks(owner)]

    def matmul(
        self,
        a: Region,
        column: int,
        columns: int,
        c: Region,
        label: str,
        merge: int | None = None,
        after: int | None = None,
    ) -> int | None:
        w = Region(self.rank, "w", 0, self.w.rows, column, columns)
        return self.builder.matmul(self.rank, a, w, c, merge=merge, after=[after], label=label)

    def box(self, maker: int, owner: int) -> int:
        """The first row of a maker's chunks in the inbox of their owner."""
        if self.op.summed:
            return self.op.sizes(maker)[owner] * (maker - (maker > owner))
        return sum(self.op.sizes(other)[owner] for other in range(maker))

    def blocks(self, owner: int) -> list[Block]:
        """The blocks into which the rows for an owner are cut. If they are summed, all ranks cut
        them in the same way."""
        rows, n = self.rows[owner], self.op.n
        if self.schedule.serial:
            cut = [(0, rows, 0, n)]
        elif self.schedule.cut == "columns":
            cut = [(0, rows, *part) for part in slices(n, self.depth)]
        elif self.adaptive and self.growing:
            cut = growing_blocks(rows, n, self.op.world)
        elif self.adaptive:
            cut = cut_blocks(rows, n, self.depth, taper_of(self.op))
        else:
            cut = [(*part, 0, n) for part in slices(rows, self.depth)]
        return [block for block in cut if block[1]]
