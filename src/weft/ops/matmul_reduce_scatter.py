"""`weft.matmul_reduce_scatter` and `torch.ops.weft.matmul_reduce_scatter`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from weft.operation import split
from weft.ops.known import again
from weft.ops.matmul_sum import bind_sum, combine_sum
from weft.ops.operands import as_rows, dispatched, group_name, resized, resolve_group
from weft.ops.operator import Bound, Operator, register, run, session_for, through_torch
from weft.plan.matmul_reduce_scatter import MatmulReduceScatter
from weft.run.session import Session
from weft.schedule import Schedule


def matmul_reduce_scatter(
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    schedule: str | Schedule = "auto",
    out: torch.Tensor | None = None,
    scatter_dim: int = 0,
    reduce_op: str = "sum",
    own_rows: int | None = None,
) -> torch.Tensor:
    """Multiplies, adds the products of all ranks, and returns to each rank its rows of the sum.
    Each chunk is sent when it is made.

    Equals, if M is divided evenly::

        y = torch.empty(x.shape[0] // world, N)
        torch.distributed.reduce_scatter_tensor(y, x @ w, op, group)

    but the sum is in the order of ranks and accumulated in float32 (float64 for float64), so that
    two runs are equal to the last bit.

    Args:
        x: [M, K] of this rank, or [..., K]; ranks may differ in K.
        w: [K, N] of this rank.
        group: a torch.distributed group; None is all ranks.
        schedule: a name such as "adaptive@dma", a `Schedule`, or "auto".
        out: the tensor for y.
        scatter_dim: the dimension of x that is divided among the ranks.
        reduce_op: "sum" or "avg".
        own_rows: the number of indices of `scatter_dim` that this rank keeps, if it is not that of
            `tensor_split`. The sum over all ranks is the size of the dimension.

    Returns:
        y: this rank's rows of the sum, [rows, N].

    The backward is overlapped as well: `all_gather_matmul` for x, whose gathered gradient also
    gives that of w. A bias is added afterwards, once: `y + bias`.
    """
    y: torch.Tensor
    arguments = (x, w, reduce_op, scatter_dim, own_rows, out)
    if not torch.compiler.is_compiling():
        made = again(group, (OPERATOR.name, schedule, *arguments))
        if made is not None:
            return made
    if dispatched([x, w], out):
        y = through_torch(
            OPERATOR,
            x,
            w,
            reduce_op,
            scatter_dim,
            group_name(group),
            schedule=str(schedule),
            own_rows=own_rows,
        )
        return y
    y = run(OPERATOR, session_for(group, x), schedule, *arguments)
    return y


def _bind(session: Session, *arguments: Any) -> Bound:
    return bind_sum(MatmulReduceScatter, session, *arguments)


def _fake(
    a: torch.Tensor,
    b: torch.Tensor,
    reduce_op: str,
    scatter_dim: int,
    group: str,
    *,
    own_rows: int | None = None,
    **_: Any,
) -> torch.Tensor:
    found = resolve_group(group)
    if own_rows is None:
        own_rows = _share(a.shape[scatter_dim], dist.get_world_size(found), dist.get_rank(found))
    return resized(a, scatter_dim, own_rows, b.shape[1])


def _share(size: Any, world: int, rank: int) -> Any:
    """The size of a rank. That of a dynamic graph is not compared, because that would fix it."""
    if isinstance(size, torch.SymInt):
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        if statically_known_true(size % world == 0):
            return size // world
    return split(size, world)[rank]


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Any
) -> None:
    x, w, ctx.reduce_op, ctx.scatter_dim, ctx.group = inputs
    ctx.save_for_backward(x, w)
    ctx.schedule = keyword_only_inputs["schedule"]
    ctx.own_rows = keyword_only_inputs["own_rows"]


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    """dX = all_gather(dY) @ W^T, dW = X^T @ all_gather(dY), the gathered dY from the same call."""
    x, w = ctx.saved_tensors
    world = dist.get_world_size(resolve_group(ctx.group))
    if ctx.reduce_op == "avg":
        dy = dy / world
    rows = split(x.shape[ctx.scatter_dim], world) if ctx.own_rows is None else [-1] * world
    gathered, (dx,) = torch.ops.weft.all_gather_matmul(
        dy,
        [w.t()],
        ctx.scatter_dim,
        ctx.group,
        return_A=True,
        schedule=ctx.schedule,
        shard_rows=rows,
    )
    dw = as_rows(x, ctx.scatter_dim)[0].t() @ as_rows(gathered, ctx.scatter_dim)[0]
    return dx, dw, None, None, None


OPERATOR = register(
    Operator(
        name="matmul_reduce_scatter",
        operation=MatmulReduceScatter,
        bind=_bind,
        combine=combine_sum,
        schema="matmul_reduce_scatter(Tensor A, Tensor B, str reduce_op, int scatter_dim, "
        'str group_name, *, str schedule="auto", int? own_rows=None) -> Tensor',
        fake=_fake,
        casts=2,
        setup_context=_setup_context,
        backward=_backward,
        repeats=True,
    )
)
