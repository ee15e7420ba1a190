"""All-to-all then matmul: every rank receives its rows from all ranks and multiplies them.

This is the dispatch of an MoE layer, followed by the first GEMM of its experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from weft.dtype import ITEM_BYTES
from weft.operation import dtypes_label, ranks_label, register, split
from weft.plan import expert_dispatch, experts, gathering, gathering_proof
from weft.plan.collective import OneCollective
from weft.plan.contents import Contents
from weft.plan.experts import pieces_of
from weft.plan.tasks import Plan
from weft.schedule import Schedule


@register
@dataclass(frozen=True)
class AllToAllMatmul:
    """Y_i on rank r = (the rows for r of every rank's X, in the order of ranks) @ W_i.

    splits: per rank, how many of its rows go to each rank. columns: per rank, the columns of each
    of its W_i. gathered: whether the received rows are an output, too. result: the dtype of every
    Y_i, if not that of X. experts: if above 0, every rank has this many experts, each with its own
    W_i; splits are then by rank and expert, and the received rows are in the order of experts and
    ranks (`plan.experts`).
    """

    splits: tuple[tuple[int, ...], ...]
    columns: tuple[tuple[int, ...], ...]
    k: int
    dtype: str = "float32"
    gathered: bool = False
    result: str | None = None
    experts: int = 0

    name: ClassVar[str] = "all_to_all_matmul"
    routed: ClassVar[bool] = True

    @classmethod
    def of(
        cls,
        m: int,
        n: int,
        k: int,
        world: int,
        dtype: str = "float32",
        result: str | None = None,
    ) -> AllToAllMatmul:
        """The operation with M rows on every rank, split evenly over all ranks."""
        return cls((split(m, world),) * world, ((n,),) * world, k, dtype, result=result)

    @property
    def world(self) -> int:
        return len(self.splits)

    @property
    def label(self) -> str:
        columns = "+".join(str(n) for n in self.columns[0])
        rows = self.received(0)
        experts = f" for {self.experts} experts" if self.experts else ""
        sizes = f"{rows}x{columns}x{self.k}{experts}"
        return f"{self.name} {sizes} {dtypes_label(self)} on {ranks_label(self.world)}"

    def sent(self, source: int, target: int) -> int:
        """The number of rows from one rank to another."""
        each = self.experts or 1
        return sum(self.splits[source][target * each : (target + 1) * each])

    def received(self, rank: int) -> int:
        """The number of rows that a rank receives from all ranks, itself included."""
        return sum(self.sent(source, rank) for source in range(self.world))

    def num_flops(self, rank: int) -> int:
        return 2 * self.received(rank) * sum(self.columns[rank]) * self.k

    def num_bytes(self, source: int, target: int) -> int:
        rows = 0 if source == target else self.sent(source, target)
        return rows * self.k * ITEM_BYTES[self.dtype]

    def compute_only(self) -> AllToAllMatmul:
        """The GEMM of one rank, without communication."""
        alone: tuple[int, ...] = (self.received(0),)
        if self.experts:
            alone = tuple(rows for _, rows in pieces_of(self.splits, self.experts).spans[0])
        return replace(self, splits=(alone,), columns=self.columns[:1], gathered=False)

    def refuses(self, schedule: Schedule) -> str | None:
        """The reason why this operation cannot have a schedule, or None if it can."""
        return experts.refuses(schedule) if self.experts else None

    def x_rows(self, rank: int) -> int:
        return sum(self.splits[rank])

    def spans(self, rank: int) -> list[tuple[int, int]]:
        each = self.experts or 1
        return [
            (sum(sizes[: rank * each]), self.sent(source, rank))
            for source, sizes in enumerate(self.splits)
        ]

    def one_collective(self, rank: int) -> OneCollective | None:
        if self.experts:
            return None
        made = OneCollective.by_pair(self.splits, rank, self.k, self.k)
        return made._replace(gathers=True, weights=len(self.columns[rank]))

    def lower(self, schedule: Schedule) -> Plan:
        if self.experts:
            return expert_dispatch.lower(self, schedule)
        return gathering.lower(self, schedule)

    def check(self, plan: Plan, contents: Contents) -> None:
        if self.experts:
            expert_dispatch.check(self, contents)
        else:
            gathering_proof.check(self, contents)
