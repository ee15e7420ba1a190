"""`torch.ops.weft.all_to_all_grouped_matmul`: `weft.all_to_all_matmul` with several experts per
rank, or several weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.errors import Unsupported
from weft.fabric.proposal import Proposal
from weft.ops.expert_operands import (
    check_expert_splits,
    check_weights,
    match_expert_splits,
    weight_gradient,
)
from weft.ops.operands import bucket_of, check_out, dtype_name
from weft.ops.operator import Bound, Operator, register
from weft.plan.all_to_all_matmul import AllToAllMatmul
from weft.plan.experts import weight_name
from weft.plan.tasks import Plannable
from weft.run.call import Tensors
from weft.run.results import empty_as
from weft.run.session import Session

Made = tuple[torch.Tensor | None, list[torch.Tensor]]


def _bind(
    session: Session,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    in_splits: Sequence[int],
    out_splits: Sequence[int],
    return_gathered: bool,
    out: torch.Tensor | None,
) -> Bound:
    world, experts = session.fabric.world, check_weights(x, weights)
    sent = check_expert_splits("in_splits", in_splits, world, experts, x.shape[0])
    taken = check_expert_splits("out_splits", out_splits, world, experts, -1)
    m, k, dtype = sum(taken), x.shape[1], dtype_name(x.dtype)
    columns = tuple(w.shape[2] for w in weights)
    if out is not None and len(weights) > 1:
        raise Unsupported("out= takes one w; leave it out for a list of weights")
    if out is not None:
        check_out("out", out, x, weights, columns[0], m)

    def expected() -> AllToAllMatmul:
        splits = tuple(taken[s * experts :][:experts] * world for s in range(world))
        return AllToAllMatmul(
            splits, (columns,) * world, k, dtype, return_gathered, experts=experts
        )

    def outputs(operation: Plannable) -> Tensors:
        made = {f"y{i}": empty_as(x, (m, n)) for i, n in enumerate(columns)}
        if out is not None:
            made["y0"] = out
        if return_gathered:
            made["gathered"] = empty_as(x, (m, k))
        return made

    def result(made: Tensors) -> Made:
        return made.get("gathered"), [made[f"y{i}"] for i in range(len(columns))]

    from_each = [sum(taken[source * experts :][:experts]) for source in range(world)]
    inputs = {"x": x.contiguous()}
    for i, w in enumerate(weights):
        inputs.update({weight_name(i, e): w[e] for e in range(experts)})
    return Bound(
        (
            ("K", k),
            ("dtype", dtype),
            ("the number of experts", experts),
            ("the number of w", len(weights)),
            ("return_gathered", return_gathered),
        ),
        (("columns", columns), ("splits", (sent, taken))),
        lambda: (*bucket_of(m, max(from_each)), columns, k, dtype, return_gathered, experts),
        expected,
        inputs,
        result,
        ("x",),
        outputs,
        work=m,
    )


def _combine(proposals: Sequence[Proposal]) -> AllToAllMatmul:
    same = dict(proposals[0].same)
    own, experts = [dict(p.own) for p in proposals], same["the number of experts"]
    splits = match_expert_splits([o["splits"] for o in own], experts)
    columns = tuple(tuple(o["columns"]) for o in own)
    gathered = same["return_gathered"]
    return AllToAllMatmul(splits, columns, same["K"], same["dtype"], gathered, experts=experts)


def _fake(
    a: torch.Tensor,
    bs: list[torch.Tensor],
    in_splits: Sequence[int],
    out_splits: Sequence[int],
    group: str,
    *,
    return_A: bool = False,  # noqa: N803 - the name in torch.ops.symm_mem
    **_: Any,
) -> Made:
    rows = sum(out_splits)
    gathered = a.new_empty(rows, a.shape[1]) if return_A else None
    return gathered, [a.new_empty(rows, b.shape[2]) for b in bs]


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Any
) -> None:
    x, weights, ctx.in_splits, ctx.out_splits, ctx.group = inputs
    gathered = output[0]
    ctx.schedule, ctx.gathered = keyword_only_inputs["schedule"], gathered is not None
    ctx.save_for_backward(x if gathered is None else gathered, *weights)
    ctx.set_materialize_grads(False)  # the received rows are often kept for the gradient only


def _backward(ctx: Any, d_gathered: torch.Tensor | None, ys: list[torch.Tensor | None]) -> Any:
    """dX = the products dY @ W^T on their way back, dW = received(X)^T @ dY for every expert."""
    received, *weights = ctx.saved_tensors
    experts = weights[0].shape[0]
    if not ctx.gathered:
        nothing = [weights[0][..., :0]]
        received, _ = torch.ops.weft.all_to_all_grouped_matmul(
            received, nothing, ctx.in_splits, ctx.out_splits, ctx.group, return_A=True
        )
    dys = [
        received.new_zeros(received.shape[0], w.shape[2]) if dy is None else dy
        for dy, w in zip(ys, weights, strict=True)
    ]
    left, right = list(dys), [w.transpose(1, 2) for w in weights]
    if d_gathered is not None:
        # The received rows are a result, too. Their gradient joins as a product with the identity.
        k = received.shape[1]
        left.append(d_gathered)
        identity = torch.eye(k, dtype=received.dtype, device=received.device)
        right.append(identity.expand(experts, k, k))
    dx = torch.ops.weft.grouped_matmul_all_to_all(
        left[0] if len(left) == 1 else torch.cat(left, 1),
        right[0] if len(right) == 1 else torch.cat(right, 1),
        ctx.out_splits,
        ctx.in_splits,
        ctx.group,
        schedule=ctx.schedule,
    )
    dws = [weight_gradient(received, dy, ctx.out_splits, experts) for dy in dys]
    return dx, dws, None, None, None


OPERATOR = register(
    Operator(
        name="all_to_all_grouped_matmul",
        operation=AllToAllMatmul,
        bind=_bind,
        combine=_combine,
        schema="all_to_all_grouped_matmul(Tensor A, Tensor[] Bs, int[] in_splits, "
        "int[] out_splits, str group_name, *, bool return_A=False, "
        'str schedule="auto") -> (Tensor?, Tensor[])',
        fake=_fake,
        casts=2,
        setup_context=_setup_context,
        backward=_backward,
    )
)
