"""All-gather then matmul: Y_i = concatenate(X of every rank) @ W_i, with X cut by rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from weft.dtype import ITEM_BYTES
from weft.operation import dtypes_label, ranks_label, register, split, starts
from weft.plan import gathering, gathering_proof
from weft.plan.collective import KINDS, OneCollective
from weft.plan.contents import Contents
from weft.plan.tasks import Plan
from weft.schedule import Schedule


@register
@dataclass(frozen=True)
class AllGatherMatmul:
    """Y_i = all_gather(X) @ W_i on every rank.

    rows: rows of X on each rank. columns: per rank, the columns of each of its W_i. gathered:
    whether the gathered X is an output, too. result: the dtype of every Y_i, if not that of X.
    """

    rows: tuple[int, ...]
    columns: tuple[tuple[int, ...], ...]
    k: int
    dtype: str = "float32"
    gathered: bool = False
    result: str | None = None

    name: ClassVar[str] = "all_gather_matmul"

    @classmethod
    def of(
        cls,
        m: int,
        n: int | Sequence[int],
        k: int,
        world: int,
        dtype: str = "float32",
        gathered: bool = False,
        result: str | None = None,
    ) -> AllGatherMatmul:
        """The operation with M rows over all ranks and N columns (of each W) on every rank."""
        columns = (n,) if isinstance(n, int) else tuple(n)
        return cls(split(m, world), (columns,) * world, k, dtype, gathered, result)

    @property
    def world(self) -> int:
        return len(self.rows)

    @cached_property
    def m(self) -> int:
        return sum(self.rows)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The first row of each rank's shard in the gathered X."""
        return tuple(starts(self.rows))

    @property
    def label(self) -> str:
        columns = "+".join(str(n) for n in self.columns[0])
        sizes = f"{self.m}x{columns}x{self.k}"
        return f"{self.name} {sizes} {dtypes_label(self)} on {ranks_label(self.world)}"

    def num_flops(self, rank: int) -> int:
        return 2 * self.m * sum(self.columns[rank]) * self.k

    def num_bytes(self, source: int, target: int) -> int:
        return 0 if source == target else self.rows[source] * self.k * ITEM_BYTES[self.dtype]

    def compute_only(self) -> AllGatherMatmul:
        """The GEMM of one rank, without communication."""
        return replace(self, rows=(self.m,), columns=self.columns[:1], gathered=False)

    def x_rows(self, rank: int) -> int:
        return self.rows[rank]

    def spans(self, rank: int) -> list[tuple[int, int]]:
        return [(0, rows) for rows in self.rows]

    def one_collective(self, rank: int) -> OneCollective:
        own, weights = (self.rows[rank],), len(self.columns[rank])
        kind = KINDS["all_gather"]
        return OneCollective(kind, self.rows, own, self.rows, self.k, self.k, True, weights)

    def lower(self, schedule: Schedule) -> Plan:
        return gathering.lower(self, schedule)

    def check(self, plan: Plan, contents: Contents) -> None:
        gathering_proof.check(self, contents)
