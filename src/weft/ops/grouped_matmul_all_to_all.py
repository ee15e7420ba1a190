"""`torch.ops.weft.grouped_matmul_all_to_all`: `weft.matmul_all_to_all` with several experts per
rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weft.fabric.proposal import Proposal
from weft.ops.expert_operands import (
    check_expert_splits,
    check_weights,
    match_expert_splits,
    weight_gradient,
)
from weft.ops.operands import (
    bucket_of,
    check_out,
    dtype_name,
    save_routed,
    shared_workspaces,
)
from weft.ops.operator import Bound, Operator, Output, into, register
from weft.plan.experts import weight_name
from weft.plan.matmul_all_to_all import MatmulAllToAll
from weft.run.session import Session
from weft.select.decide import AnySchedule
from weft.strategy import Strategy


def _bind(
    session: Session,
    x: torch.Tensor,
    w: torch.Tensor,
    in_splits: Sequence[int],
    out_splits: Sequence[int],
    out: torch.Tensor | None,
) -> Bound:
    world, experts = session.fabric.world, check_weights(x, [w])
    made, n, k, dtype = x.shape[0], w.shape[2], x.shape[1], dtype_name(x.dtype)
    sent = check_expert_splits("in_splits", in_splits, world, experts, made)
    taken = check_expert_splits("out_splits", out_splits, world, experts, -1)
    shape = (sum(taken), n)
    if out is not None:
        check_out("out", out, x, [w], n, shape[0])

    def workspaces(schedule: AnySchedule | None) -> Mapping[str, int]:
        assert not isinstance(schedule, Strategy)
        return shared_workspaces(schedule, world, made, shape[0], n, dtype, False)

    to_each = [sum(sent[owner * experts :][:experts]) for owner in range(world)]
    return Bound(
        (("N", n), ("dtype", dtype), ("the number of experts", experts)),
        (("K", k), ("splits", (sent, taken))),
        lambda: (*bucket_of(made, max(to_each)), n, k, dtype, experts),
        lambda: MatmulAllToAll((sent,) * world, n, (k,) * world, dtype, experts=experts),
        {"x": x, **{weight_name(0, e): w[e] for e in range(experts)}},
        lambda results: into(out, results["y"]),
        stored=Output(shape, x.dtype, out),
        work=made,
        workspaces=workspaces,
    )


def _combine(proposals: Sequence[Proposal]) -> MatmulAllToAll:
    same = dict(proposals[0].same)
    own, experts = [dict(p.own) for p in proposals], same["the number of experts"]
    splits = match_expert_splits([o["splits"] for o in own], experts)
    inner = tuple(o["K"] for o in own)
    return MatmulAllToAll(splits, same["N"], inner, same["dtype"], experts=experts)


def _fake(
    a: torch.Tensor,
    b: torch.Tensor,
    in_splits: Sequence[int],
    out_splits: Sequence[int],
    group: str,
    **_: Any,
) -> torch.Tensor:
    return a.new_empty(sum(out_splits), b.shape[2])


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    """dP = dY back on the ranks of the experts, dX = dP @ W^T, dW = X^T @ dP for every expert."""
    x, w = ctx.saved_tensors
    received, (dx,) = torch.ops.weft.all_to_all_grouped_matmul(
        dy,
        [w.transpose(1, 2)],
        ctx.out_splits,
        ctx.in_splits,
        ctx.group,
        return_A=True,
        schedule=ctx.schedule,
    )
    return dx, weight_gradient(x, received, ctx.in_splits, w.shape[0]), None, None, None


OPERATOR = register(
    Operator(
        name="grouped_matmul_all_to_all",
        operation=MatmulAllToAll,
        bind=_bind,
        combine=_combine,
        schema="grouped_matmul_all_to_all(Tensor A, Tensor B, int[] in_splits, int[] out_splits, "
        'str group_name, *, str schedule="auto") -> Tensor',
        fake=_fake,
        casts=2,
        setup_context=save_routed,
        backward=_backward,
    )
)
