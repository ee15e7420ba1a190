"""`weft.matmul_all_to_all` and `torch.ops.weft.matmul_all_to_all`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft import fabric as fabrics
from weft.fabric import HostFabric
from weft.fabric.landing import Landing
from weft.ops.common import (
    as_rows,
    as_shaped,
    bucket_of,
    check_operands,
    check_out,
    check_splits,
    chosen_item,
    decide,
    define,
    dispatched,
    dtype_name,
    group_name,
    match_splits,
    num_rows,
    requested,
    resized,
    resolve_group,
    spaces_of,
)
from weft.ops.landed import carry_out_landed, in_kernel, landing_for
from weft.plan.matmul_all_to_all import MatmulAllToAll
from weft.run.call import refuse
from weft.run.proposal import Proposal, proposal_of
from weft.schedule import Schedule
from weft.select.auto import Decision

NAME = "matmul_all_to_all"


def matmul_all_to_all(
    x: torch.Tensor,
    w: torch.Tensor,
    in_splits: Sequence[int],
    out_splits: Sequence[int],
    *,
    group: dist.ProcessGroup | None = None,
    schedule: str | Schedule = "auto",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiplies x by w and sends rows of the product to the ranks they are for, chunks leaving as
    they are made: what an MoE layer does after its experts (combine).

    Equals::

        y = torch.empty(sum(out_splits), N)
        torch.distributed.all_to_all_single(y, x @ w, out_splits, in_splits, group)

    Args:
        x: [rows, K] of this rank, or [..., K], whose first dimension is split; ranks may differ
            in K.
        w: [K, N] of this rank.
        in_splits: how many rows of x @ w go to each rank; zero is fine.
        out_splits: how many rows come from each rank.
        group: a torch.distributed group; None is all ranks.
        schedule: a name such as "adaptive@dma", a `Schedule`, or "auto".
        out: where to put y.

    Returns:
        y [sum(out_splits), N]: the rows for this rank, in the order of the ranks that made them.

    The backward is overlapped as well: `all_to_all_matmul` for x, whose received rows also give the
    gradient of w. A bias is added outside: `y + bias`.
    """
    if dispatched([x, w], out, [in_splits, out_splits]):
        y: torch.Tensor = torch.ops.weft.matmul_all_to_all(
            x, w, in_splits, out_splits, group_name(group), schedule=str(schedule)
        )
        return y
    return _run(x, w, in_splits, out_splits, group, schedule, out)


def _run(
    x: torch.Tensor,
    w: torch.Tensor,
    in_splits: Sequence[int],
    out_splits: Sequence[int],
    group: dist.ProcessGroup | None,
    schedule: str | Schedule,
    out: torch.Tensor | None,
) -> torch.Tensor:
    fabric = fabrics.of(group)
    landing: Landing | None = None
    try:
        decision = requested(schedule) or _in_place(fabric)
        check_operands("x", x, [w])
        rows, inner = as_rows(x, 0)
        one = num_rows(inner)
        made, n = rows.shape[0], w.shape[1]
        sent = check_splits("in_splits", in_splits, fabric.world, made, one)
        taken = check_splits("out_splits", out_splits, fabric.world, -1, one)
        shape = (sum(taken), n)
        if out is not None:
            check_out("out", out, x, [w], n, shape[0])
        k, dtype = rows.shape[1], dtype_name(x.dtype)
    except Exception as error:
        refuse(fabric, NAME, error)
        raise
    if decision is None:
        key = (*bucket_of(made, max(sent)), n, k, dtype)
        decision = decide(fabric, NAME, key, lambda: _expected(sent, n, k, dtype), made)
    try:
        same = (
            ("N", n),
            ("dtype", dtype),
            ("the schedule", decision.said),
            ("the shape of x beside its rows and K", inner),
        )
        own = (("K", k), ("splits", (sent, taken)), *chosen_item(decision.told))
        proposal = proposal_of(NAME, same, own)
        if in_kernel(fabric, decision):
            spaces = {}
            landing = landing_for(fabric, shape, x.dtype, out)
        else:
            spaces = spaces_of(decision, fabric.world, made, sum(taken), n, dtype, False)
    except Exception as error:
        refuse(fabric, NAME, error)
        raise

    inputs = {"x": rows, "w": w}
    y = carry_out_landed(
        fabric, proposal, decision, inputs, _combine, spaces, landing, shape, x.dtype, out
    )
    return as_shaped(y, x, 0)


def _in_place(fabric: HostFabric) -> Decision | None:
    """Where links are as fast as memory, products are made in the y of the rank that needs them, in
    as few pieces as can be; otherwise there is a choice to make."""
    if fabric.link.paced or fabric.network or fabric.world == 1:
        return None
    schedule = Schedule.parse("fused:1")
    return Decision(schedule.name, schedule, "links are as fast as memory: made where needed")


def _expected(sent: tuple[int, ...], n: int, k: int, dtype: str) -> MatmulAllToAll:
    """The operation if all ranks send what this rank sends: near enough to choose a schedule by."""
    world = len(sent)
    return MatmulAllToAll((sent,) * world, n, (k,) * world, dtype)


def _combine(proposals: Sequence[Proposal]) -> MatmulAllToAll:
    """The operation that the proposals of all ranks make together."""
    same = dict(proposals[0].same)
    own = [dict(p.own) for p in proposals]
    splits = match_splits([o["splits"] for o in own])
    return MatmulAllToAll(splits, same["N"], tuple(o["K"] for o in own), same["dtype"])


def _kernel(
    a: torch.Tensor,
    b: torch.Tensor,
    in_splits: Sequence[int],
    out_splits: Sequence[int],
    group: str,
    *,
    schedule: str = "auto",
) -> torch.Tensor:
    return _run(a, b, in_splits, out_splits, resolve_group(group), schedule, None)


def _fake(
    a: torch.Tensor,
    b: torch.Tensor,
    in_splits: Sequence[int],
    out_splits: Sequence[int],
    group: str,
    *,
    schedule: str = "auto",
) -> torch.Tensor:
    return resized(a, 0, sum(out_splits), b.shape[1])


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Any
) -> None:
    x, w, ctx.in_splits, ctx.out_splits, ctx.group = inputs
    ctx.save_for_backward(x, w)
    ctx.schedule = keyword_only_inputs["schedule"]


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
        schedule=ctx.schedule,
    )
    return dx, as_rows(x, 0)[0].t() @ as_rows(received, 0)[0], None, None, None


define(
    "matmul_all_to_all(Tensor A, Tensor B, int[] in_splits, int[] out_splits, str group_name, *, "
    'str schedule="auto") -> Tensor',
    _kernel,
    _fake,
    _backward,
    _setup_context,
)
