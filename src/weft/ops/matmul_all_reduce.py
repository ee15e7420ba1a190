"""`weft.matmul_all_reduce` and `torch.ops.weft.matmul_all_reduce`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from weft.ops.common import as_rows, define, dispatched, group_name, resized, resolve_group
from weft.ops.few_rows import widened
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
    scale: torch.Tensor | None = None,
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
        w: [K, N] of this rank, in the dtype of x; or bfloat16, float16 or int8 where x is wider,
            to be read in fewer bytes (for up to 32 rows; beyond that it is widened first).
        group: a torch.distributed group; None is all ranks.
        schedule: a name such as "adaptive@dma", a `Schedule`, or "auto".
        out: where to put y.
        reduce_op: "sum" or "avg".
        scale: [N] in float32, what the columns of w are to be multiplied by; int8 needs it.

    Up to 32 rows, "auto" is `fused`: one kernel in which blocks of y leave as they are made, the
    owner of a block adds them and stores the sum into everyone's y, on any link. It likes w with
    its columns side by side, as `linear.weight.t()` has them; another w is packed so at its second
    call, and the pack is kept while w is there and not written to (WEFT_PREPACK=0: never).

    Returns:
        y: the sum, [M, N], on every rank.

    Its gradient is taken as tensor parallelism means it: y is one tensor that all ranks hold, and
    so is dy, so that the backward is two local products (dx = dy @ w^T, dw = x^T @ dy) and nothing
    is sent. Where every rank has a loss of its own, add up dy over the ranks first. A bias is added
    outside, once: `y + bias`.
    """
    graph = torch.compiler.is_compiling() or torch.is_grad_enabled()
    if graph and dispatched([x, w], out):
        y: torch.Tensor = torch.ops.weft.matmul_all_reduce(
            x, w, reduce_op, group_name(group), scale, schedule=str(schedule)
        )
        return y
    return summed(NAME, x, w, 0, reduce_op, group, schedule, None, out, scale)


def _kernel(
    a: torch.Tensor,
    b: torch.Tensor,
    reduce_op: str,
    group: str,
    scale: torch.Tensor | None = None,
    *,
    schedule: str = "auto",
) -> torch.Tensor:
    return summed(NAME, a, b, 0, reduce_op, resolve_group(group), schedule, None, None, scale)


def _fake(
    a: torch.Tensor,
    b: torch.Tensor,
    reduce_op: str,
    group: str,
    scale: torch.Tensor | None = None,
    *,
    schedule: str = "auto",
) -> torch.Tensor:
    return resized(a, 0, a.shape[0], b.shape[1])


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Any
) -> None:
    x, w, reduce_op, group, scale = inputs
    ctx.save_for_backward(x, w, scale)
    ctx.share = dist.get_world_size(resolve_group(group)) if reduce_op == "avg" else 1


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    x, w, scale = ctx.saved_tensors
    if ctx.share > 1:
        dy = dy / ctx.share
    dx = dy @ widened(x, w, scale).t() if ctx.needs_input_grad[0] else None
    dw = None
    if ctx.needs_input_grad[1]:
        dw = (as_rows(x, 0)[0].t() @ as_rows(dy, 0)[0]).to(w.dtype)
        dw = dw if scale is None else (dw * scale).to(w.dtype)
    return dx, dw, None, None, None


define(
    "matmul_all_reduce(Tensor A, Tensor B, str reduce_op, str group_name, "
    'Tensor? scale=None, *, str schedule="auto") -> Tensor',
    _kernel,
    _fake,
    _backward,
    _setup_context,
)
