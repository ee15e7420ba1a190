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
its peers, one step behind, so that links always have work. Chunks are cut finer where nothing hides
them (`plan.blocks`). s1 are the sums of the other rank:

    adaptive           compute| y1.0  y1.1  y0.0+ y1.2  y0.1+ y1.3  y0.2+ y0.3+ |+|
                       engine        | y0.0 | y0.1 | s1.0 | y0.2 | s1.1 | y0.3 | s1.2 | s1.3 |

Sums are always in the order of ranks, whatever the order of arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from weft.dtype import ITEM_BYTES
from weft.errors import InvalidPlan
from weft.plan.blocks import Block, depth_of
from weft.plan.builder import Builder, refuse_impossible
from weft.plan.scatter_products import Made, Products, Scattering, taper_of
from weft.plan.tasks import Plan, Region
from weft.schedule import Schedule


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
    return depth_of(most, operation.n, taper_of(operation))


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
def lower(operation: Scattering, schedule: Schedule, growing: bool = False) -> Plan:
    """The plan of all ranks; raises `Unsupported` with the reason if the schedule is impossible.
    growing: whether adaptive begins with a small chunk, and each is larger than the one before."""
    refuse_impossible(schedule)
    depth = default_depth(operation, schedule) if schedule.depth is None else schedule.depth
    builder = Builder(operation, schedule)
    ranks = [
        _ScatterRank(builder, operation, rank, max(depth, 1), growing)
        for rank in range(operation.world)
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


class _ScatterRank(Products):
    """Lowers the tasks of one rank."""

    def __init__(
        self, builder: Builder, op: Scattering, rank: int, depth: int, growing: bool
    ) -> None:
        super().__init__(builder, op, rank, depth, growing)
        self.arrived: dict[int, list[Made]] = {}
        self.sums: list[Made] = []
        self._pulled: int | None = None

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

    def _pull_product(self, maker: int, product: Made) -> None:
        if self.op.summed:
            target, row = "inbox", self.box(maker, self.rank) + product.row
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
        own = self.blocks(self.rank)
        if self.hetero and self.rows[self.rank]:
            if self.adaptive and self.op.everywhere:  # direct: peers read sums as they are computed
                for number, block in enumerate(own):
                    self.multiply_chunk(self.rank, block, merge=number)
            elif self.schedule.fusion == "fused" and self.schedule.cut == "rows":
                self._multiply_last()
            else:
                self.multiply_chunk(self.rank, self.whole(self.rank))
        if self.op.summed:
            for block in own:
                self._sum(block)
        else:
            self._keep()

    def sum_step(self, step: int) -> None:
        """One sum of this rank's own rows."""
        own = self.blocks(self.rank)
        if 0 <= step < len(own):
            self._sum(own[step])

    def _multiply_last(self) -> None:
        """Computes this rank's own rows after the fused steps."""
        own = self.rows[self.rank]
        if not self.op.summed:
            self.multiply_chunk(self.rank, self.whole(self.rank))
            return
        region = self.partial.rows_of(self.base, own)
        a = self.x.rows_of(self.first[self.rank], own)
        task = self.matmul(a, 0, self.op.n, region, "local shard")
        self.made[self.rank].append(Made(0, own, 0, self.op.n, region, task))

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
        self.sums.append(Made(*block, target, task))

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


def _find(products: Sequence[Made], block: Block) -> Made:
    """The product that contains a block."""
    row, rows, column, columns = block
    for product in products:
        down, right = row - product.row, column - product.column
        if 0 <= down <= product.rows - rows and 0 <= right <= product.columns - columns:
            r = product.region
            part = Region(r.rank, r.buffer, r.row + down, rows, r.column + right, columns)
            return Made(*block, part, product.task)
    raise InvalidPlan(f"no product has rows {row}:{row + rows}")
