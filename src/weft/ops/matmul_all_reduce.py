"""`weft.matmul_all_reduce` and `torch.ops.weft.matmul_all_reduce`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from weft.ops.common import as_rows, define, dispatched, group_name, resized, resolve_group
from weft.ops.summing import summed
from weft.schedule import Schedule

NAME = "matmul_all_reduce"


def matmul_all_reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    schedule: str | Schedule = "auto",
    out: torch.Tensor | None = None,
    reduce_op: str = "sum",
) -> torch.Tensor:
    """Multiplies and adds the products of all ranks, on every rank; chunks leave as they are made,
    and come back as soon as they are added.

    Equals::

        y = x @ w
        torch.distributed.all_reduce(y, op, group)

    but the sum is always in the order of ranks and grows in float32 (float64 for float64), so that
    two runs, and all ranks, are equal to the last bit.

    Args:
        x: [M, K] of this rank, or [..., K]; ranks may differ in K.
        w: [K, N] of this rank.
        group: a torch.distributed group; None is all ranks.
        schedule: a name such as "adaptive@dma", a `Schedule`, or "auto".
        out: where to put y.
        reduce_op: "sum" or "avg".

    Returns:
        y: the sum, [M, N], on every rank.

    Its gradient is taken as tensor parallelism means it: y is one tensor that all ranks hold, and
    so is dy, so that the backward is two local products (dx = dy @ w^T, dw = x^T @ dy) and nothing
    is sent. Where every rank has a loss of its own, add up dy over the ranks first. A bias is added
    outside, once: `y + bias`.
    """
    if dispatched([x, w], out):
        y: torch.Tensor = torch.ops.weft.matmul_all_reduce(
            x, w, reduce_op, group_name(group), schedule=str(schedule)
        )
        return y
    return summed(NAME, x, w, 0, reduce_op, group, schedule, None, out)


def _kernel(
    a: torch.Tensor, b: torch.Tensor, reduce_op: str, group: str, *, schedule: str = "auto"
) -> torch.Tensor:
    return summed(NAME, a, b, 0, reduce_op, resolve_group(group), schedule, None, None)


def _fake(
    a: torch.Tensor, b: torch.Tensor, reduce_op: str, group: str, *, schedule: str = "auto"
) -> torch.Tensor:
    return resized(a, 0, a.shape[0], b.shape[1])


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Any
) -> None:
    x, w, reduce_op, group = inputs
    ctx.save_for_backward(x, w)
    ctx.share = dist.get_world_size(resolve_group(group)) if reduce_op == "avg" else 1


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    x, w = ctx.saved_tensors
    if ctx.share > 1:
        dy = dy / ctx.share
    return dy @ w.t(), as_rows(x, 0)[0].t() @ as_rows(dy, 0)[0], None, None


define(
    "matmul_all_reduce(Tensor A, Tensor B, str reduce_op, str group_name, *, "
    'str schedule="auto") -> Tensor',
    _kernel,
    _fake,
    _backward,
    _setup_context,
)
