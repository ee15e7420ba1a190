"""Optimizers of embedding tables that run in the backward pass and touch each row once.

No gradient of a table is kept: when a bag's gradient has arrived, the gradients of each row are
added, and the row is updated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch


class TableOptimizer(Protocol):
    """Updates rows of a table in place."""

    def update(self, table: torch.Tensor, rows: torch.Tensor, gradient: torch.Tensor) -> None:
        """rows: different row numbers. gradient: of each of them, in float32."""
        ...


@dataclass(frozen=True)
class SGDInBackward:
    """Stochastic gradient descent for `optimizer=` of `weft.embedding_all_to_all`: row -= lr * g.
    Equals `torch.optim.SGD` without momentum."""

    lr: float

    def update(self, table: torch.Tensor, rows: torch.Tensor, gradient: torch.Tensor) -> None:
        """Updates rows of a table."""
        _subtract(table, rows, self.lr * gradient)


@dataclass(frozen=True)
class RowWiseAdagradInBackward:
    """Row-wise Adagrad for `optimizer=` of `weft.embedding_all_to_all`, with one number per row:

        state[row] += (g * g).mean()
        row -= lr * g / (state[row].sqrt() + eps)

    `state` has the numbers by table, in float32; save and restore them with the tables.
    """

    lr: float
    eps: float = 1e-8
    state: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict, repr=False)

    def update(self, table: torch.Tensor, rows: torch.Tensor, gradient: torch.Tensor) -> None:
        """Updates rows of a table and their numbers."""
        sums = self.state.get(table)
        if sums is None:
            sums = self.state[table] = torch.zeros(table.shape[0], device=table.device)
        total = sums[rows] + gradient.square().mean(1)
        sums[rows] = total
        _subtract(table, rows, gradient * (self.lr / (total.sqrt() + self.eps))[:, None])


def apply(
    optimizer: TableOptimizer, table: torch.Tensor, index: torch.Tensor, rows: torch.Tensor
) -> None:
    """Updates a table with the gradients of the rows that bags have read; rows may repeat."""
    different, place = torch.unique(index, return_inverse=True)
    total = torch.zeros(different.shape[0], table.shape[1], device=table.device)
    total.index_add_(0, place, rows.float())
    with torch.no_grad():
        optimizer.update(table, different, total)


def _subtract(table: torch.Tensor, rows: torch.Tensor, change: torch.Tensor) -> None:
    table.index_copy_(0, rows, (table[rows].float() - change).to(table.dtype))
