"""Matmul then all-reduce: Y = sum over ranks of X @ W, on every rank, with K cut over ranks.

The rows are distributed: each rank adds its own rows, as in a reduce-scatter, and sends the sums to
all ranks. With few rows there are not enough for all ranks. Then `in-kernel` and `serial`
distribute columns instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weft.dtype import ITEM_BYTES
from weft.operation import register, result_dtype
from weft.plan import in_kernel, scattering
from weft.plan.collective import KINDS, OneCollective
from weft.plan.matmul_reduce_scatter import MatmulReduceScatter
from weft.plan.tasks import Plan
from weft.schedule import Schedule

FEW_ROWS = 32
"""Up to this many rows, reading w bounds the time of the product, as in a GEMV."""


@register
@dataclass(frozen=True)
class MatmulAllReduce(MatmulReduceScatter):
    """Y = sum(X_s @ W_s for every rank s) on every rank. rows: per rank, the rows that it adds."""

    name: ClassVar[str] = "matmul_all_reduce"
    everywhere: ClassVar[bool] = True
    in_kernel: ClassVar[bool] = True

    def num_bytes(self, source: int, target: int) -> int:
        rows = self.rows[target] + self.rows[source]
        return 0 if source == target else rows * self.n * ITEM_BYTES[result_dtype(self)]

    def one_collective(self, rank: int) -> OneCollective:
        kind, whole = KINDS["all_reduce"], (self.m,)
        return OneCollective(kind, whole, whole, whole, self.n, self.inner[rank])

    def lower(self, schedule: Schedule) -> Plan:
        if schedule.fusion == "kernel":
            return in_kernel.lower(self, schedule)
        if shares_columns(schedule, self.m, self.world):
            return in_kernel.lower_serial(self, schedule)
        return scattering.lower(self, schedule)


def shares_columns(schedule: Schedule, m: int, world: int) -> bool:
    """Whether a serial all-reduce distributes columns instead of rows."""
    return schedule.serial and schedule.engine != "direct" and m <= FEW_ROWS and world > 1
