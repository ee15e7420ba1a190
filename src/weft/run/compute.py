"""The computation of each kind of task of a compute lane, in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.dtype import float8
from weft.errors import Unsupported
from weft.fabric.product_sums import add
from weft.plan.tasks import AnyTask, Await, KernelTiles, Lookup, Matmul, Permute, Reduce, Region
from weft.run.scaled import Scales, scaled_product

_FLOAT8 = float8()

View = Callable[[Region], torch.Tensor]


def execute(task: AnyTask, view: View, more: Any) -> None:
    """Computes a task on the regions that `view` returns. more: the embedding bags for lookups, or
    the scales for products."""
    if isinstance(task, Matmul):
        if isinstance(more, Scales):
            more.multiply(task, view)
            return
        a = view(task.a)
        multiply(a.t() if task.transposed else a, view(task.b), view(task.c), task.accumulate)
    elif isinstance(task, Reduce):
        add(list(map(view, task.sources)), list(map(view, task.targets)))
    elif isinstance(task, KernelTiles):
        for part in task.parts:
            multiply(view(part.a), view(part.b), view(part.c), False)
    elif isinstance(task, Lookup):
        for s, target in zip(task.sources, task.targets, strict=True):
            more.pool(s.row, s.rows, s.column, s.columns, view(target))
    elif isinstance(task, Await):
        pass
    elif isinstance(task, Permute):
        for source, target in zip(task.sources, task.targets, strict=True):
            view(target).copy_(view(source))
        if isinstance(more, Scales):
            more.follow(task)
    else:
        raise Unsupported(f"compute cannot carry out {task.label!r}")


def multiply(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, accumulate: bool) -> None:
    """c = a @ b, or c += a @ b. Narrower operands are first converted to the dtype of c."""
    if a.dtype in _FLOAT8 and not accumulate and a.shape[1]:
        one = torch.ones(1, 1, device=c.device)
        scaled_product(a, b, c, one, one)
        return
    if a.dtype != c.dtype:
        a, b = a.to(c.dtype), b.to(c.dtype)
    if a.shape[1] == 0:
        if not accumulate:
            c.zero_()
    elif accumulate:
        torch.addmm(c, a, b, out=c)
    else:
        torch.mm(a, b, out=c)
