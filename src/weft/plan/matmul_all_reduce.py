"""Matmul then all-reduce: Y = sum over ranks of X @ W, on every rank, with K cut over ranks.

The rows are shared out: each rank adds its own as in a reduce-scatter, and passes the sums on. Of
few rows there are not enough for all ranks: `in-kernel` and `serial` then share out columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weft.operation import ITEM_BYTES, register
from weft.plan import in_kernel, scattering
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
        return 0 if source == target else rows * self.n * ITEM_BYTES[self.dtype]

    def lower(self, schedule: Schedule) -> Plan:
        if schedule.fusion == "kernel":
            return in_kernel.lower(self, schedule)
        if shares_columns(schedule, self.m, self.world):
            return in_kernel.lower_serial(self, schedule)
        return scattering.lower(self, schedule)


def shares_columns(schedule: Schedule, m: int, world: int) -> bool:
    """Whether a serial all-reduce distributes columns instead of rows."""
    return schedule.serial and schedule.engine != "direct" and m <= FEW_ROWS and world > 1
