"""Matmul then all-to-all: every rank multiplies its rows and sends each row to its target rank.

This is the last GEMM of the experts of an MoE layer, followed by combine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from weft.dtype import ITEM_BYTES
from weft.operation import dtypes_label, register, result_dtype, split
from weft.plan import in_kernel, scattering, scattering_proof
from weft.plan.contents import Contents
from weft.plan.tasks import Plan
from weft.schedule import Schedule


@register
@dataclass(frozen=True)
class MatmulAllToAll:
    """Y on rank r = the rows of X_s @ W_s that are sent to r, in the order of ranks s.

    splits: per rank, how many of its rows go to each rank. inner: the K of every rank. result: the
    dtype of the products that travel and of Y, if not that of X.
    """

    splits: tuple[tuple[int, ...], ...]
    n: int
    inner: tuple[int, ...]
    dtype: str = "float32"
    result: str | None = None

    name: ClassVar[str] = "matmul_all_to_all"
    summed: ClassVar[bool] = False
    everywhere: ClassVar[bool] = False
    in_kernel: ClassVar[bool] = True

    @classmethod
    def of(
        cls,
        m: int,
        n: int,
        k: int,
        world: int,
        dtype: str = "float32",
        result: str | None = None,
    ) -> MatmulAllToAll:
        """The operation with M rows on every rank, split evenly over all ranks."""
        return cls((split(m, world),) * world, n, (k,) * world, dtype, result)

    @property
    def world(self) -> int:
        return len(self.splits)

    @property
    def label(self) -> str:
        rows, k = sum(self.splits[0]), self.inner[0]
        return f"{self.name} {rows}x{self.n}x{k} {dtypes_label(self)} on {self.world} ranks"

    def num_flops(self, rank: int) -> int:
        return 2 * sum(self.splits[rank]) * self.n * self.inner[rank]

    def num_bytes(self, source: int, target: int) -> int:
        rows = 0 if source == target else self.splits[source][target]
        return rows * self.n * ITEM_BYTES[result_dtype(self)]

    def compute_only(self) -> MatmulAllToAll:
        """The GEMM of one rank, without communication."""
        return replace(self, splits=((sum(self.splits[0]),),), inner=self.inner[:1])

    def sizes(self, maker: int) -> tuple[int, ...]:
        return self.splits[maker]

    def lower(self, schedule: Schedule) -> Plan:
        if schedule.fusion == "kernel":
            return in_kernel.lower(self, schedule)
        return scattering.lower(self, schedule)

    def check(self, plan: Plan, contents: Contents) -> None:
        scattering_proof.check(self, contents)
