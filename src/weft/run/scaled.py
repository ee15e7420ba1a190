"""Products of float8 operands with their scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from weft.plan.tasks import Matmul, Permute, Region

STEP = 16
"""GEMM libraries take float8 operands whose K and N are multiples of this."""


@dataclass(frozen=True)
class Scales:
    """The scales of x and w, each one number, or one for each row of x and each column of w, and a
    bias for each column. They are those of one call."""

    x: torch.Tensor  # [1, 1] or [rows, 1], float32
    w: torch.Tensor  # [1, 1] or [1, columns], float32
    bias: torch.Tensor | None = None
    packed: dict[str, torch.Tensor] = field(default_factory=dict)
    """Scales of rows that a plan has moved to another buffer, by its name."""

    def multiply(self, task: Matmul, view: Callable[[Region], torch.Tensor]) -> None:
        """Carries out a matmul of x and w, or of parts of them, with the scales of those parts."""
        row, column, columns = task.a.row, task.b.column, task.b.columns
        of_rows = self.packed.get(task.a.buffer, self.x)
        x = of_rows if of_rows.shape[0] == 1 else of_rows[row : row + task.a.rows]
        w = self.w if self.w.shape[1] == 1 else self.w[:, column : column + columns]
        bias = None if self.bias is None else self.bias[column : column + columns]
        scaled_product(view(task.a), view(task.b), view(task.c), x, w, bias)

    def follow(self, task: Permute) -> None:
        """Moves scales as the rows of x were moved."""
        if self.x.shape[0] == 1:
            return
        for source, target in zip(task.sources, task.targets, strict=True):
            if source.buffer == "x":
                made = self.packed.setdefault(target.buffer, torch.empty_like(self.x))
                rows = self.x[source.row : source.row + source.rows]
                made[target.row : target.row + target.rows].copy_(rows)


def scaled_product(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> None:
    """c = a @ b, times the scales, plus the bias; sums in float32, rounded once.

    On a device the library's float8 GEMM does it, where it takes the operands. On a CPU, which has
    none that is faster, the operands are converted to float32, which is exact.
    """
    if a.device.type != "cpu" and _fits(a, b, c) and bias is None:
        c.copy_(torch._scaled_mm(a, b, *_as_asked(a, b, a_scale, b_scale), out_dtype=c.dtype))
        return
    product = a.float() @ b.float()
    product *= a_scale
    product *= b_scale
    if bias is not None:
        product += bias
    c.copy_(product)


def _fits(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> bool:
    """Whether a GEMM library takes the operands: sizes in steps, a by rows, b by columns."""
    (m, k), n = a.shape, b.shape[1]
    by_columns = b.stride(0) == 1 and b.stride(1) >= k
    by_rows = a.stride(1) == 1 and a.stride(0) >= k
    return m > 0 and k > 0 and n > 0 and k % STEP == n % STEP == 0 and by_columns and by_rows


def _as_asked(
    a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale for each, or a scale for every row and every column. A slice that begins in the
    middle of 16 bytes is copied, because cuBLAS refuses it."""
    if a_scale.numel() == b_scale.numel() == 1:
        return a_scale.reshape(()), b_scale.reshape(())
    rows = a_scale.expand(a.shape[0], 1).contiguous()
    columns = b_scale.expand(1, b.shape[1]).contiguous()
    rows, columns = (s.clone() if s.data_ptr() % 16 else s for s in (rows, columns))
    return rows, columns
