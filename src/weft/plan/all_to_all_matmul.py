"""All-to-all then matmul: every rank receives its rows from all ranks and multiplies them.

This is the dispatch of an MoE layer, followed by the first GEMM of its experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from weft.dtype import ITEM_BYTES
from weft.operation import dtypes_label, register, split
from weft.plan import gathering, gathering_proof
from weft.plan.contents import Contents
from weft.plan.tasks import Plan
from weft.schedule import Schedule


@register
@dataclass(frozen=True)
class AllToAllMatmul:
    """Y_i on rank r = (the rows for r of every rank's X, in the order of ranks) @ W_i.

    splits: per rank, how many of its rows go to each rank. columns: per rank, the columns of each
    of its W_i. gathered: whether the received rows are an output, too. result: the dtype of every
    Y_i, if not that of X.
    """

    splits: tuple[tuple[int, ...], ...]
    columns: tuple[tuple[int, ...], ...]
    k: int
    dtype: str = "float32"
    gathered: bool = False
    result: str | None = None

    name: ClassVar[str] = "all_to_all_matmul"

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
        return f"{self.name} {rows}x{columns}x{self.k} {dtypes_label(self)} on {self.world} ranks"

    def received(self, rank: int) -> int:
        """The number of rows that a rank receives from all ranks, itself included."""
        return sum(sizes[rank] for sizes in self.splits)

    def num_flops(self, rank: int) -> int:
        return 2 * self.received(rank) * sum(self.columns[rank]) * self.k

    def num_bytes(self, source: int, target: int) -> int:
        rows = 0 if source == target else self.splits[source][target]
        return rows * self.k * ITEM_BYTES[self.dtype]

    def compute_only(self) -> AllToAllMatmul:
        """The GEMM of one rank, without communication."""
        alone = ((self.received(0),),)
        return replace(self, splits=alone, columns=self.columns[:1], gathered=False)

    def x_rows(self, rank: int) -> int:
        return sum(self.splits[rank])

    def spans(self, rank: int) -> list[tuple[int, int]]:
        return [(sum(sizes[:rank]), sizes[rank]) for sizes in self.splits]

    def lower(self, schedule: Schedule) -> Plan:
        return gathering.lower(self, schedule)

    def check(self, plan: Plan, contents: Contents) -> None:
        gathering_proof.check(self, contents)
