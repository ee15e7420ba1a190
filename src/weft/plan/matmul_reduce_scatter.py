"""Matmul then reduce-scatter: Y_r = the rows of r in the sum of X @ W, with K cut over ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from weft.dtype import ITEM_BYTES
from weft.operation import dtypes_label, ranks_label, register, result_dtype, split
from weft.plan import scattering, scattering_proof
from weft.plan.collective import KINDS, OneCollective
from weft.plan.contents import Contents
from weft.plan.tasks import Plan
from weft.schedule import Schedule


@register
@dataclass(frozen=True)
class MatmulReduceScatter:
    """Y on rank r = the rows of r in sum(X_s @ W_s for every rank s).

    rows: per rank, how many of the M rows it keeps. inner: the K of every rank. result: the dtype
    of the products that travel and of Y, if not that of X.
    """

    rows: tuple[int, ...]
    n: int
    inner: tuple[int, ...]
    dtype: str = "float32"
    result: str | None = None

    name: ClassVar[str] = "matmul_reduce_scatter"
    summed: ClassVar[bool] = True
    everywhere: ClassVar[bool] = False

    @classmethod
    def of(
        cls,
        m: int,
        n: int,
        k: int,
        world: int,
        dtype: str = "float32",
        result: str | None = None,
    ) -> Self:
        """The operation with M rows, N columns, and K on every rank."""
        return cls(split(m, world), n, (k,) * world, dtype, result)

    @property
    def world(self) -> int:
        return len(self.rows)

    @property
    def m(self) -> int:
        return sum(self.rows)

    @property
    def label(self) -> str:
        k = self.inner[0]
        return (
            f"{self.name} {self.m}x{self.n}x{k} {dtypes_label(self)} on {ranks_label(self.world)}"
        )

    def num_flops(self, rank: int) -> int:
        return 2 * self.m * self.n * self.inner[rank]

    def num_bytes(self, source: int, target: int) -> int:
        return (
            0 if source == target else self.rows[target] * self.n * ITEM_BYTES[result_dtype(self)]
        )

    def compute_only(self) -> Self:
        """The GEMM of one rank, without communication."""
        return replace(self, rows=(self.m,), inner=self.inner[:1])

    def sizes(self, maker: int) -> tuple[int, ...]:
        return self.rows

    def one_collective(self, rank: int) -> OneCollective:
        kind, own = KINDS["reduce_scatter"], (self.rows[rank],)
        return OneCollective(kind, self.rows, self.rows, own, self.n, self.inner[rank])

    def lower(self, schedule: Schedule) -> Plan:
        return scattering.lower(self, schedule)

    def check(self, plan: Plan, contents: Contents) -> None:
        scattering_proof.check(self, contents)
