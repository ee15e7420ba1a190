"""`weft.all_to_all_matmul` and `torch.ops.weft.all_to_all_matmul`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
import torch.distributed as dist

from weft.fabric.proposal import Proposal
from weft.ops import all_to_all_grouped_matmul as grouped
from weft.ops import gather_contract as _gather_contract  # noqa: F401 - its operator is used
from weft.ops.expert_operands import Splits, as_experts, as_sizes, has_experts
from weft.ops.known import Operands, again
from weft.ops.operands import (
    as_rows,
    as_shaped,
    bucket_of,
    check_operands,
    check_out,
    check_splits,
    differentiated,
    dispatched,
    dtype_name,
    group_name,
    has_columns,
    match_splits,
    num_rows,
    resized,
    save_routed,
)
from weft.ops.operator import Bound, Operator, register, run, session_for, through_torch
from weft.plan.all_to_all_matmul import AllToAllMatmul
from weft.plan.tasks import Plannable
from weft.run.call import Tensors
from weft.run.results import empty_as
from weft.run.session import Session
from weft.schedule import Schedule


@overload
def all_to_all_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    in_splits: Splits,
    out_splits: Splits,
    *,
    group: dist.ProcessGroup | None = ...,
    schedule: str | Schedule = ...,
    out: torch.Tensor | None = ...,
    return_gathered: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def all_to_all_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    in_splits: Splits,
    out_splits: Splits,
    *,
    group: dist.ProcessGroup | None = ...,
    schedule: str | Schedule = ...,
    out: torch.Tensor | None = ...,
    return_gathered: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def all_to_all_matmul(
    x: torch.Tensor,
    w: Sequence[torch.Tensor],
    in_splits: Splits,
    out_splits: Splits,
    *,
    group: dist.ProcessGroup | None = ...,
    schedule: str | Schedule = ...,
    out: torch.Tensor | None = ...,
    return_gathered: Literal[False] = ...,
) -> list[torch.Tensor]: ...
@overload
def all_to_all_matmul(
    x: torch.Tensor,
    w: Sequence[torch.Tensor],
    in_splits: Splits,
    out_splits: Splits,
    *,
    group: dist.ProcessGroup | None = ...,
    schedule: str | Schedule = ...,
    out: torch.Tensor | None = ...,
    return_gathered: Literal[True],
) -> tuple[list[torch.Tensor], torch.Tensor]: ...
def all_to_all_matmul(
    x: torch.Tensor,
    w: torch.Tensor | Sequence[torch.Tensor],
    in_splits: Splits,
    out_splits: Splits,
    *,
    group: dist.ProcessGroup | None = None,
    schedule: str | Schedule = "auto",
    out: torch.Tensor | None = None,
    return_gathered: bool = False,
) -> (
    torch.Tensor
    | list[torch.Tensor]
    | tuple[torch.Tensor, torch.Tensor]
    | tuple[list[torch.Tensor], torch.Tensor]
):
    """Sends rows of x to other ranks and multiplies the received rows by w; the communication
    overlaps the matmul. This is the dispatch of an MoE layer, with the first product of its
    experts.

    Equals::

        received = torch.empty(sum(out_splits), K)
        torch.distributed.all_to_all_single(received, x, out_splits, in_splits, group)
        y = received @ w

    With several experts per rank, w is [E, K, N]. The rows of x are then sorted by rank and expert,
    and the received rows by expert and rank, so that the rows of an expert are next to each other.
    Equals, with splits of shape [world, E]::

        torch.distributed.all_to_all_single(by_rank, x, out_splits.sum(1), in_splits.sum(1), group)
        parts = by_rank.split(out_splits.flatten().tolist())          # by rank and expert
        y = cat([part @ w[e] for e in range(E) for part in parts[e::E]])

    Args:
        x: [rows, K] of this rank, or [..., K], whose first dimension is split.
        w: [K, N] or [E, K, N] of this rank, or a list of such weights (the gate and the up
            projection of experts), for a list of results.
        in_splits: the number of rows of x for each rank, which may be zero; with experts, for each
            rank and expert. A list, a list of lists, or an integer tensor.
        out_splits: the number of rows from each rank; with experts, from each rank for each expert.
        group: a torch.distributed group; None is all ranks.
        schedule: a name such as "adaptive@dma", a `Schedule`, or "auto".
        out: the tensor for y.
        return_gathered: whether to return the received rows too.

    Returns:
        y [sum(out_splits), N], or a list of them; with `return_gathered`, (y, received).

    The backward is overlapped as well: `matmul_all_to_all` for x, and for w a matmul that gathers x
    along its K. With experts or several weights, the received rows are kept for the gradient of w
    instead. A bias is added afterwards: `y + bias`.
    """
    in_splits, out_splits = as_sizes(in_splits), as_sizes(out_splits)
    arguments = (x, w, in_splits, out_splits, return_gathered, out)
    if not torch.compiler.is_compiling():
        known = again(group, (OPERATOR.name, schedule, *arguments))
        if known is not None:
            return known
    if has_experts(w):
        made = _grouped(x, w, in_splits, out_splits, group, schedule, out, return_gathered)
        received: Any = made[0]
        ys = made[1]
        y: Any = ys[0] if isinstance(w, torch.Tensor) else ys
        return (y, received) if return_gathered else y
    if dispatched([x, w], out, [in_splits, out_splits]):
        received, y = through_torch(
            OPERATOR,
            x,
            w,
            in_splits,
            out_splits,
            group_name(group),
            return_A=return_gathered,
            schedule=str(schedule),
        )
    else:
        received, y = run(OPERATOR, session_for(group, x), schedule, *arguments)
    return (y, received) if return_gathered else y


def _grouped(
    x: torch.Tensor,
    w: torch.Tensor | Sequence[torch.Tensor],
    in_splits: Sequence[int],
    out_splits: Sequence[int],
    group: dist.ProcessGroup | None,
    schedule: str | Schedule,
    out: torch.Tensor | None,
    return_gathered: bool,
) -> grouped.Made:
    weights = as_experts(w)
    made: grouped.Made
    if dispatched([x, *weights], out, [in_splits, out_splits]):
        # The gradient of the weights needs the received rows.
        keep = return_gathered or differentiated(weights)
        made = through_torch(
            grouped.OPERATOR,
            x,
            weights,
            in_splits,
            out_splits,
            group_name(group),
            return_A=keep,
            schedule=str(schedule),
        )
        return made
    session = session_for(group, x)
    made = run(
        grouped.OPERATOR,
        session,
        schedule,
        x,
        weights,
        in_splits,
        out_splits,
        return_gathered,
        out,
    )
    return made


def _bind(
    session: Session,
    x: torch.Tensor,
    w: torch.Tensor,
    in_splits: Sequence[int],
    out_splits: Sequence[int],
    return_gathered: bool,
    out: torch.Tensor | None,
) -> Bound:
    world = session.fabric.world
    check_operands("x", x, [w])
    rows, inner = as_rows(x, 0)
    one = num_rows(inner)
    sent = check_splits("in_splits", in_splits, world, rows.shape[0], one)
    taken = check_splits("out_splits", out_splits, world, -1, one)
    m, n, k, dtype = sum(taken), w.shape[1], rows.shape[1], dtype_name(x.dtype)
    layout = has_columns(w)
    if out is not None:
        check_out("out", out, x, [w], n, m)

    def expected() -> AllToAllMatmul:
        splits = tuple((rows,) * world for rows in taken)
        return AllToAllMatmul(splits, ((n,),) * world, k, dtype, return_gathered)

    def operands(x: torch.Tensor, w: torch.Tensor, *rest: Any) -> Operands:
        out = rest[-1]

        def outputs(_: Plannable) -> Tensors:
            made = {"y0": empty_as(x, (m, n)) if out is None else out}
            if return_gathered:
                made["gathered"] = empty_as(x, (m, k))
            return made

        def result(made: Tensors) -> tuple[torch.Tensor | None, torch.Tensor]:
            received = as_shaped(made["gathered"], x, 0) if return_gathered else None
            return received, as_shaped(made["y0"], x, 0)

        return Operands({"x": as_rows(x, 0)[0].contiguous(), "w0": w}, result, outputs)

    same = (
        ("K", k),
        ("dtype", dtype),
        ("the shape of x beside its rows and K", inner),
        ("return_gathered", return_gathered),
    )
    return Bound(
        same,
        (("columns", n), ("splits", (sent, taken))),
        lambda: (*bucket_of(m, max(taken)), n, k, dtype, return_gathered, layout),
        expected,
        shared=("x",),
        work=m,
        again=operands,
    )


def _combine(proposals: Sequence[Proposal]) -> AllToAllMatmul:
    same = dict(proposals[0].same)
    own = [dict(p.own) for p in proposals]
    splits = match_splits([o["splits"] for o in own])
    columns = tuple((o["columns"],) for o in own)
    return AllToAllMatmul(splits, columns, same["K"], same["dtype"], same["return_gathered"])


def _fake(
    a: torch.Tensor,
    b: torch.Tensor,
    in_splits: Sequence[int],
    out_splits: Sequence[int],
    group: str,
    *,
    return_A: bool = False,  # noqa: N803 - the name in torch.ops.symm_mem
    **_: Any,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    rows = sum(out_splits)
    received = resized(a, 0, rows, a.shape[-1]) if return_A else None
    return received, resized(a, 0, rows, b.shape[1])


def _backward(ctx: Any, received: torch.Tensor | None, dy: torch.Tensor) -> tuple[Any, ...]:
    """dX = all_to_all(dY @ W^T) back to where the rows came from, dW = received(X)^T @ dY."""
    x, w = ctx.saved_tensors
    left, right = dy, w.t()
    if received is not None:
        # The received rows are a result, too. Their gradient joins as a product with the identity.
        left = torch.cat([dy, received], -1)
        right = torch.cat([right, torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)])
    dx = torch.ops.weft.matmul_all_to_all(
        left, right, ctx.out_splits, ctx.in_splits, ctx.group, schedule=ctx.schedule
    )
    rows, inner = as_rows(x, 0)
    sent, taken = (
        [n * num_rows(inner) for n in splits] for splits in (ctx.in_splits, ctx.out_splits)
    )
    (dw,) = torch.ops.weft.gather_contract(
        rows, [as_rows(dy, 0)[0]], sent, taken, ctx.group, schedule=ctx.schedule
    )
    return dx, dw, None, None, None


OPERATOR = register(
    Operator(
        name="all_to_all_matmul",
        operation=AllToAllMatmul,
        bind=_bind,
        combine=_combine,
        schema="all_to_all_matmul(Tensor A, Tensor B, int[] in_splits, int[] out_splits, "
        'str group_name, *, bool return_A=False, str schedule="auto") -> (Tensor?, Tensor)',
        fake=_fake,
        casts=2,
        setup_context=save_routed,
        backward=_backward,
        repeats=True,
    )
)
