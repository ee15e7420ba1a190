"""Matmul then all-reduce: Y = sum over ranks of X @ W, on every rank, with K cut over ranks.

The rows are shared out: each rank adds its own as in a reduce-scatter, and passes the sums on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weft.operation import ITEM_BYTES, register
from weft.plan.matmul_reduce_scatter import MatmulReduceScatter


@register
@dataclass(frozen=True)
class MatmulAllReduce(MatmulReduceScatter):
    """Y = sum(X_s @ W_s for every rank s) on every rank. rows: how many of them each rank adds."""

    name: ClassVar[str] = "matmul_all_reduce"
    everywhere: ClassVar[bool] = True

    def num_bytes(self, source: int, target: int) -> int:
        rows = self.rows[target] + self.rows[source]
        return 0 if source == target else rows * self.n * ITEM_BYTES[self.dtype]
