"""Lowers operations that multiply and then send. Every rank computes X @ W, and each row of it goes
to the rank that owns the row. The owner adds what it receives from all ranks (reduce-scatter), or
keeps it (all-to-all).

The operation states how many rows go to each owner (`sizes`). A rank computes the chunks of its
peers first, starting with the next rank, and its own chunks last. So links are busy from the first
chunk on. Owners pull a chunk as soon as it is computed. For 2 ranks, where y1 are the rows that the
other rank owns:

    serial             compute| y0 y1                  |                        |+|
                       engine                          | y0                     |
    hetero-unfused-1d  compute| y1.0  y1.1  y1.2  y1.3 | y0         + + +  |+|
                       engine        | y0.0  y0.1  y0.2  y0.3 |
    adaptive           compute| y1.0  y1.1  y1.2  y1.3 | y0.0 + y0.1 + y0.2 + y0.3 |+|
                       engine        | y0.0  y0.1  y0.2  y0.3 |

Cut by columns (2d), a chunk is a block of N, so that every chunk has complete sums over K. With
`direct`, a rank writes a chunk into its owner's memory. If all ranks need the sums (all-reduce),
owners also send them chunk by chunk. Adaptive then interleaves a rank's own chunks with those of
its peers, one step behind, so that links always have work. The first and last chunks are small. s1
are the sums of the other rank:

    adaptive           compute| y1.0  y1.1  y0.0+ y1.2  y0.1+ y1.3  y0.2+ y0.3+ |+|
                       engine        | y0.0 | y0.1 | s1.0 | y0.2 | s1.1 | y0.3 | s1.2 | s1.3 |

Sums are always in the order of ranks, whatever the order of arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

from weft.errors import InvalidPlan
from weft.operation import ITEM_BYTES, starts
from weft.plan.blocks import Block, cut_blocks, depth_of
from weft.plan.builder import Builder, refuse_impossible
from weft.plan.contents import Contents, Product, covers_once
from weft.plan.order import slices
from weft.plan.tasks import Plan, Plannable, Region
from weft.schedule import Schedule


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


def default_depth(operation: Scattering, schedule: Schedule) -> int:
    """The number of chunks per owner if the schedule does not state it.

    A fixed schedule uses `world`. Adaptive uses more, because links are idle until the first chunk
    is computed. But every chunk is a GEMM of its own, which limits their number (`plan.blocks`).
    """
    if schedule.fusion != "adaptive":
        return operation.world
    if schedule.engine == "direct":
        return 1
    most = max(rows for rank in range(operation.world) for rows in operation.sizes(rank))
    return depth_of(most, operation.n, tapered=operation.everywhere)


def shared_bytes(
    schedule: Schedule, world: int, made: int, owned: int, n: int, dtype: str, summed: bool
) -> dict[str, int]:
    """The bytes of the workspaces of a rank that peers read or write, by name.

    made: the rows of its product. owned: the rows that it adds, or keeps.
    """
    row = n * ITEM_BYTES[dtype]
    if schedule.engine != "direct":
        return {"partial": made * row}
    return {"inbox": owned * row * (world - 1 if summed else 1)}


@lru_cache(maxsize=64)
def lower(operation: Scattering, schedule: Schedule) -> Plan:
    """The plan of all ranks; raises `Unsupported` with the reason if the schedule is impossible."""
    refuse_impossible(schedule)
    depth = default_depth(operation, schedule) if schedule.depth is None else schedule.depth
    builder = Builder(operation, schedule)
    ranks = [
        _ScatterRank(builder, operation, rank, max(depth, 1)) for rank in range(operation.world)
    ]
    if operation.world == 1:
        ranks[0].alone()
        return builder.plan()
    if all(rank.interleaved for rank in ranks):
        _interleave(ranks)
        return builder.plan()
    for rank in ranks:
        rank.make()
    for rank in ranks:
        rank.pull(ranks)
    for rank in ranks:
        rank.complete(ranks)
    if operation.everywhere:
        for rank in ranks:
            rank.gather(ranks)
    return builder.plan()


def _interleave(ranks: Sequence[_ScatterRank]) -> None:
    """Interleaves each rank's own chunks, one step behind, with the chunks of its peers. By then
    the peers' terms of these chunks have arrived, so that sums are sent while there is still much
    to compute, and links always have work."""
    for step in range(max(rank.num_steps for rank in ranks) + 1):
        for rank in ranks:
            rank.make_step(step)
        for rank in ranks:
            rank.pull_step(ranks, step)
        for rank in ranks:
            rank.sum_step(step - 1)
        for rank in ranks:
            rank.gather_step(ranks, step - 1)
    for rank in ranks:
        rank.bring_own()


class _Made(NamedTuple):
    """A block of the product for one owner: its rows and columns, its region, and its task."""

    row: int
    rows: int
    column: int
    columns: int
    region: Region
    task: int | None


class _ScatterRank:
    """Lowers the tasks of one rank."""

    def __init__(self, builder: Builder, op: Scattering, rank: int, depth: int) -> None:
        self.builder, self.op, self.rank, self.depth = builder, op, rank, depth
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
        self.made: dict[int, list[_Made]] = {owner: [] for owner in range(op.world)}
        self.arrived: dict[int, list[_Made]] = {}
        self.sums: list[_Made] = []
        self.interleaved = self.adaptive and self.hetero and op.everywhere and not self.direct
        self._pulled: int | None = None
        self._multiplied: int | None = None
        self._num_made = 0
        self._buffers()

    def _buffers(self) -> None:
        op, rank, add = self.op, self.rank, self.builder.add_buffer
        own, made = self.rows[rank], sum(self.rows)
        kept = made if op.everywhere else own if op.summed else sum(self.received)
        self.x = add("x", rank, made, op.inner[rank], "input")
        self.w = add("w", rank, op.inner[rank], op.n, "input")
        self.y = add("y", rank, kept, op.n, "output")
        if op.world == 1:
            return
        if not self.direct:
            self.partial = add("partial", rank, made, op.n, "workspace")
            if op.summed:
                self.inbox = add("inbox", rank, own * (op.world - 1), op.n, "workspace")
        else:
            if op.summed:
                self.partial = add("partial", rank, own, op.n, "workspace")
            boxed = own * (op.world - 1) if op.summed else kept
            self.inbox = add("inbox", rank, boxed, op.n, "workspace")
        if op.everywhere:
            self.reduced = add("reduced", rank, own, op.n, "workspace")

    def alone(self) -> None:
        self.builder.matmul(self.rank, self.x.all(), self.w.all(), self.y.all(), label="all")

    # -- making ------------------------------------------------------------------------------------

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
                self._multiply_chunk(owner, block)

    @property
    def num_steps(self) -> int:
        return max((len(self._blocks(owner)) for owner in range(self.op.world)), default=0)

    def make_step(self, step: int) -> None:
        """Computes this step's chunks of all peers, and the previous step's chunk of this rank."""
        for owner in [*self.owners, self.rank]:
            blocks, number = self._blocks(owner), step - (owner == self.rank)
            if 0 <= number < len(blocks):
                # Loose tasks, so that sums may run between them. Each follows the last product.
                self._multiply_chunk(owner, blocks[number], merge=self._num_made)
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
        task = self._matmul(self.x.rows_of(row, rows), column, columns, region, label)
        for owner, (first, size) in enumerate(zip(self.first, self.rows, strict=True)):
            if row <= first and first + size <= row + rows and size:
                part = Region(self.rank, "partial", first, size, column, columns)
                self.made[owner].append(_Made(0, size, column, columns, part, task))

    def _multiply_chunk(self, owner: int, block: Block, merge: int | None = None) -> None:
        """One GEMM over a chunk of one owner, written to its final place if possible."""
        row, rows, column, columns = block
        rank, at, where = self.rank, self.first[owner] + row, "partial"
        if owner == rank and not self.op.summed:
            at, where = self.places[owner] + row, "y"
        elif owner == rank and self.direct:
            at = row
        elif self.direct:
            rank, at, where = owner, self._box(self.rank, owner) + row, "inbox"
        region = Region(rank, where, at, rows, column, columns)
        a = self.x.rows_of(self.first[owner] + row, rows)
        label = f"y{owner}[{row}:{row + rows}]"
        if columns < self.op.n:
            label += f"[{column}:{column + columns}]"
        after = self._multiplied if self.interleaved else None
        task = self._matmul(a, column, columns, region, label, merge=merge, after=after)
        self._multiplied = task if task is not None else self._multiplied
        self.made[owner].append(_Made(*block, region, task))

    def _whole(self, owner: int) -> Block:
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
            task = self._matmul(a, 0, self.op.n, region, f"step {number}", after=after)
            for owner, block in step:
                part = self.partial.rows_of(base, block[1])
                self.made[owner].append(_Made(*block, part, task))
                base += block[1]
        self._base = base

    def _steps(self) -> list[list[tuple[int, Block]]]:
        """(owner, block of its rows) of the chunks of every step."""
        cuts = [[(owner, block) for block in self._blocks(owner)] for owner in self.owners]
        longest = max(map(len, cuts), default=0)
        return [[cut[i] for cut in cuts if i < len(cut)] for i in range(longest)]

    def _chunks(self) -> list[tuple[int, Block]]:
        if self.schedule.pattern == "all":
            return [chunk for step in self._steps() for chunk in step]
        return [(owner, block) for owner in self.owners for block in self._blocks(owner)]

    def _matmul(
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

    def _box(self, maker: int, owner: int) -> int:
        """The first row of a maker's chunks in the inbox of their owner."""
        if self.op.summed:
            return self.op.sizes(maker)[owner] * (maker - (maker > owner))
        return sum(self.op.sizes(other)[owner] for other in range(maker))

    # -- sending -----------------------------------------------------------------------------------

    def pull(self, ranks: Sequence[_ScatterRank]) -> None:
        """Pulls what peers computed for this rank, in the order in which they compute it."""
        self.arrived = {maker: [] for maker in self.makers}
        if self.direct:
            for maker in self.makers:
                self.arrived[maker] = ranks[maker].made[self.rank]
            return
        made = [ranks[maker].made[self.rank] for maker in self.makers]
        if self.schedule.pattern == "peer":
            order = [
                (m, product) for m, some in zip(self.makers, made, strict=True) for product in some
            ]
        else:
            longest = max(map(len, made), default=0)
            pairs = list(zip(self.makers, made, strict=True))
            order = [(m, some[i]) for i in range(longest) for m, some in pairs if i < len(some)]
        for maker, product in order:
            self._pull_product(maker, product)

    def pull_step(self, ranks: Sequence[_ScatterRank], step: int) -> None:
        """Pulls what peers computed for this rank in one step."""
        for maker in self.makers:
            arrived = self.arrived.setdefault(maker, [])
            products = ranks[maker].made[self.rank]
            if len(arrived) == step < len(products):
                self._pull_product(maker, products[step])

    def _pull_product(self, maker: int, product: _Made) -> None:
        if self.op.summed:
            target, row = "inbox", self._box(maker, self.rank) + product.row
        else:
            target, row = "y", self.places[maker] + product.row
        region = Region(self.rank, target, row, product.rows, product.column, product.columns)
        task = self._copy(maker, product.region, region, product.task, f"y{self.rank} of {maker}")
        self.arrived[maker].append(product._replace(region=region, task=task))

    def _copy(
        self, peer: int, source: Region, target: Region, after: int | None, label: str
    ) -> int | None:
        chained = self._pulled if self.schedule.pattern == "peer" else None
        cut = f"[{target.row}:{target.row + target.rows}]"
        task = self.builder.copy(
            self.rank, source, target, peer=peer, after=[after, chained], label=f"{label} {cut}"
        )
        self._pulled = task if task is not None else self._pulled
        return task

    # -- completing --------------------------------------------------------------------------------

    def complete(self, ranks: Sequence[_ScatterRank]) -> None:
        """Computes this rank's own rows, and adds or keeps what peers computed for it."""
        own = self._blocks(self.rank)
        if self.hetero and self.rows[self.rank]:
            if self.adaptive and self.op.everywhere:  # direct: peers read sums as they are computed
                for number, block in enumerate(own):
                    self._multiply_chunk(self.rank, block, merge=number)
            elif self.schedule.fusion == "fused" and self.schedule.cut == "rows":
                self._multiply_last()
            else:
                self._multiply_chunk(self.rank, self._whole(self.rank))
        if self.op.summed:
            for block in own:
                self._sum(block)
        else:
            self._keep()

    def sum_step(self, step: int) -> None:
        """One sum of this rank's own rows."""
        own = self._blocks(self.rank)
        if 0 <= step < len(own):
            self._sum(own[step])

    def _multiply_last(self) -> None:
        """Computes this rank's own rows after the fused steps."""
        own = self.rows[self.rank]
        if not self.op.summed:
            self._multiply_chunk(self.rank, self._whole(self.rank))
            return
        region = self.partial.rows_of(self._base, own)
        a = self.x.rows_of(self.first[self.rank], own)
        task = self._matmul(a, 0, self.op.n, region, "local shard")
        self.made[self.rank].append(_Made(0, own, 0, self.op.n, region, task))

    def _blocks(self, owner: int) -> list[Block]:
        """The blocks into which the rows for an owner are cut. If they are summed, all ranks cut
        them in the same way."""
        rows, n = self.rows[owner], self.op.n
        if self.schedule.serial:
            cut = [(0, rows, 0, n)]
        elif self.schedule.cut == "columns":
            cut = [(0, rows, *part) for part in slices(n, self.depth)]
        elif self.adaptive:
            cut = cut_blocks(rows, n, self.depth, tapered=self.op.everywhere)
        else:
            cut = [(*part, 0, n) for part in slices(rows, self.depth)]
        return [block for block in cut if block[1]]

    def _sum(self, block: Block) -> None:
        row, rows, column, columns = block
        products = [
            _find(self.made[self.rank] if maker == self.rank else self.arrived[maker], block)
            for maker in range(self.op.world)
        ]
        where = "reduced" if self.op.everywhere else "y"
        target = Region(self.rank, where, row, rows, column, columns)
        task = self.builder.reduce(
            self.rank,
            [product.region for product in products],
            [target],
            early=self.adaptive and self.hetero,
            after=[product.task for product in products],
            label=f"sum [{row}:{row + rows}]",
        )
        self.sums.append(_Made(*block, target, task))

    def _keep(self) -> None:
        """Copies to y what is not there yet."""
        products = {**self.arrived, self.rank: self.made[self.rank]}
        for maker, some in products.items():
            for product in some:
                if product.region.key == self.y.all().key:
                    continue
                at = self.places[maker] + product.row
                target = Region(self.rank, "y", at, product.rows, product.column, product.columns)
                label = f"keep [{at}:{at + product.rows}]"
                move = [(product.region, target)]
                self.builder.permute(self.rank, move, after=[product.task], label=label)

    def gather(self, ranks: Sequence[_ScatterRank]) -> None:
        """Pulls the sums of all other owners, in the order in which they are computed."""
        for number in range(max(len(rank.sums) for rank in ranks)):
            self.gather_step(ranks, number)
        self.bring_own()

    def gather_step(self, ranks: Sequence[_ScatterRank], number: int) -> None:
        """Pulls one sum from every other owner."""
        for owner in self.makers:
            if not 0 <= number < len(ranks[owner].sums):
                continue
            product = ranks[owner].sums[number]
            at = self.first[owner] + product.row
            target = Region(self.rank, "y", at, product.rows, product.column, product.columns)
            if not self.direct:
                self._copy(owner, product.region, target, product.task, f"sum of {owner}")
                continue
            self.builder.reduce(
                self.rank,
                [product.region],
                [target],
                early=self.adaptive and self.hetero,
                after=[product.task],
                label=f"sum of {owner} [{at}:{at + product.rows}]",
            )

    def bring_own(self) -> None:
        """Copies this rank's own sums to y at the end, when compute is otherwise idle."""
        own = self.y.rows_of(self.first[self.rank], self.rows[self.rank])
        after = [product.task for product in self.sums]
        self.builder.permute(self.rank, [(self.reduced.all(), own)], after=after, label="own sums")


def _find(products: Sequence[_Made], block: Block) -> _Made:
    """The product that contains a block."""
    row, rows, column, columns = block
    for product in products:
        down, right = row - product.row, column - product.column
        if 0 <= down <= product.rows - rows and 0 <= right <= product.columns - columns:
            r = product.region
            part = Region(r.rank, r.buffer, r.row + down, rows, r.column + right, columns)
            return _Made(*block, part, product.task)
    raise InvalidPlan(f"no product has rows {row}:{row + rows}")


def check(op: Scattering, contents: Contents) -> None:
    """Raises unless every output holds each term of each rank that belongs there exactly once."""
    for rank in range(op.world):
        found: dict[int, list[tuple[int, int, int, int, int, int]]] = {
            maker: [] for maker in range(op.world)
        }
        for held in contents.of(rank, "y"):
            value = held.value
            if not isinstance(value, Product) or value.b[1] != "w":
                raise InvalidPlan(f"y@{rank} holds {value} where a product belongs")
            maker = value.b[0]
            place, first, rows = _block(op, rank, maker)
            at = held.row - place
            inside = at >= 0 and at + held.rows <= rows
            # An empty sum has no terms, but its zeros must be written exactly once.
            empty = op.inner[maker] == 0
            right = (value.a, value.row) == ((maker, "x"), first + at) or empty
            if not inside or not right or value.column != held.column:
                raise InvalidPlan(f"y@{rank}: rows of rank {maker} are in the wrong place")
            k = (0, 1) if empty else (value.k, value.size)
            found[maker].append((at, held.rows, held.column, held.columns, *k))
        for maker, boxes in found.items():
            size = (_block(op, rank, maker)[2], op.n, max(op.inner[maker], 1))
            covers_once(boxes, size, f"y@{rank} from rank {maker}")


def _block(op: Scattering, rank: int, maker: int) -> tuple[int, int, int]:
    """(row of y, row of the product, rows) of a maker's product in a rank's y."""
    sizes = list(op.sizes(maker))
    if op.everywhere:
        return 0, 0, sum(sizes)
    place = 0 if op.summed else sum(op.sizes(other)[rank] for other in range(maker))
    return place, sum(sizes[:rank]), sizes[rank]
