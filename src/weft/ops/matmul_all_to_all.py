"""`weft.matmul_all_to_all` and `torch.ops.weft.matmul_all_to_all`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft.fabric.proposal import Proposal
from weft.ops import grouped_matmul_all_to_all as grouped
from weft.ops.expert_operands import Splits, as_sizes, has_experts
from weft.ops.known import Operands, Output, again
from weft.ops.operands import (
    as_rows,
    as_shaped,
    bucket_of,
    check_operands,
    check_out,
    check_splits,
    dispatched,
    dtype_name,
    group_name,
    has_columns,
    match_splits,
    num_rows,
    resized,
    save_routed,
    shared_workspaces,
)
from weft.ops.operator import (
    Bound,
    Operator,
    in_kernel,
    into,
    register,
    run,
    session_for,
    through_torch,
)
from weft.plan.matmul_all_to_all import MatmulAllToAll
from weft.run.session import Session
from weft.schedule import Schedule
from weft.select.decide import AnySchedule, for_gradient
from weft.strategy import Strategy


def matmul_all_to_all(
    x: torch.Tensor,
    w: torch.Tensor,
    in_splits: Splits,
    out_splits: Splits,
    *,
    group: dist.ProcessGroup | None = None,
    schedule: str | Schedule = "auto",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiplies x by w and sends rows of the product to other ranks. Each chunk is sent when it is
    made. This is the combine of an MoE layer, with the last product of its experts.

    Equals::

        y = torch.empty(sum(out_splits), N)
        torch.distributed.all_to_all_single(y, x @ w, out_splits, in_splits, group)

    With several experts per rank, w is [E, K, N]: the rows of x are sorted by expert and rank, as
    `all_to_all_matmul` returns them, and those of y by rank and expert, as its x is. So with the
    splits of that call, `matmul_all_to_all(h, w2, out_splits, in_splits)` undoes its exchange.

    Args:
        x: [rows, K] of this rank, or [..., K], whose first dimension is split; ranks may differ
            in K.
        w: [K, N] or [E, K, N] of this rank.
        in_splits: the number of rows of x @ w for each rank, which may be zero; with experts, for
            each rank from each expert. A list, a list of lists, or an integer tensor.
        out_splits: the number of rows from each rank; with experts, from each rank and expert.
        group: a torch.distributed group; None is all ranks.
        schedule: a name such as "adaptive@dma", a `Schedule`, or "auto".
        out: the tensor for y.

    Returns:
        y [sum(out_splits), N]: the rows for this rank, in the order of the ranks that made them.

    The backward is overlapped as well: `all_to_all_matmul` for x, whose received rows also give the
    gradient of w. A bias is added afterwards: `y + bias`.
    """
    y: torch.Tensor
    in_splits, out_splits = as_sizes(in_splits), as_sizes(out_splits)
    if not torch.compiler.is_compiling():
        made = again(group, (OPERATOR.name, schedule, x, w, in_splits, out_splits, out))
        if made is not None:
            return made
    asked = grouped.OPERATOR if has_experts(w) else OPERATOR
    if dispatched([x, w], out, [in_splits, out_splits]):
        name = group_name(group)
        y = through_torch(asked, x, w, in_splits, out_splits, name, schedule=str(schedule))
        return y
    y = run(asked, session_for(group, x), schedule, x, w, in_splits, out_splits, out)
    return y


def _bind(
    session: Session,
    x: torch.Tensor,
    w: torch.Tensor,
    in_splits: Sequence[int],
    out_splits: Sequence[int],
    out: torch.Tensor | None,
) -> Bound:
    fabric = session.fabric
    world = fabric.world
    check_operands("x", x, [w])
    rows, inner = as_rows(x, 0)
    one = num_rows(inner)
    made, n, k, dtype = rows.shape[0], w.shape[1], rows.shape[1], dtype_name(x.dtype)
    layout = has_columns(w)
    sent = check_splits("in_splits", in_splits, world, made, one)
    taken = check_splits("out_splits", out_splits, world, -1, one)
    shape = (sum(taken), n)
    if out is not None:
        check_out("out", out, x, [w], n, shape[0])

    def workspaces(schedule: AnySchedule | None) -> Mapping[str, int]:
        if in_kernel(fabric, schedule):
            return {}
        assert not isinstance(schedule, Strategy)
        return shared_workspaces(schedule, world, made, shape[0], n, dtype, False)

    def operands(x: torch.Tensor, w: torch.Tensor, *rest: Any) -> Operands:
        out = rest[-1]
        return Operands(
            {"x": as_rows(x, 0)[0], "w": w},
            lambda results: as_shaped(into(out, results["y"]), x, 0),
            stored=Output(shape, x.dtype, out),
        )

    return Bound(
        (("N", n), ("dtype", dtype), ("the shape of x beside its rows and K", inner)),
        (("K", k), ("splits", (sent, taken))),
        lambda: (*bucket_of(made, max(sent)), n, k, dtype, layout),
        lambda: MatmulAllToAll((sent,) * world, n, (k,) * world, dtype),
        work=made,
        workspaces=workspaces,
        again=operands,
    )


def _combine(proposals: Sequence[Proposal]) -> MatmulAllToAll:
    same = dict(proposals[0].same)
    own = [dict(p.own) for p in proposals]
    splits = match_splits([o["splits"] for o in own])
    return MatmulAllToAll(splits, same["N"], tuple(o["K"] for o in own), same["dtype"])


def _fake(
    a: torch.Tensor,
    b: torch.Tensor,
    in_splits: Sequence[int],
    out_splits: Sequence[int],
    group: str,
    **_: Any,
) -> torch.Tensor:
    return resized(a, 0, sum(out_splits), b.shape[1])


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    """dP = all_to_all(dY) back to where the rows were made, dX = dP @ W^T, dW = X^T @ dP."""
    x, w = ctx.saved_tensors
    received, dx = torch.ops.weft.all_to_all_matmul(
        dy,
        w.t(),
        ctx.out_splits,
        ctx.in_splits,
        ctx.group,
        return_A=True,
        schedule=for_gradient(ctx.schedule),
    )
    return dx, as_rows(x, 0)[0].t() @ as_rows(received, 0)[0], None, None, None


OPERATOR = register(
    Operator(
        name="matmul_all_to_all",
        operation=MatmulAllToAll,
        bind=_bind,
        combine=_combine,
        schema="matmul_all_to_all(Tensor A, Tensor B, int[] in_splits, int[] out_splits, "
        'str group_name, *, str schedule="auto") -> Tensor',
        fake=_fake,
        casts=2,
        setup_context=save_routed,
        backward=_backward,
        repeats=True,
    )
)
