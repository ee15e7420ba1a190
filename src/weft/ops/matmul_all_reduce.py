"""`weft.matmul_all_reduce` and `torch.ops.weft.matmul_all_reduce`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from weft.fabric.interface import PeerOutput
from weft.ops import modes
from weft.ops.few_rows import again as again_in_kernel
from weft.ops.few_rows import check_weight, prepared, remember, widened
from weft.ops.known import Operands, again, key_of
from weft.ops.matmul_sum import bind_sum, combine_sum
from weft.ops.operands import (
    DTYPES,
    as_rows,
    dispatched,
    group_name,
    resized,
    resolve_group,
)
from weft.ops.operator import Bound, Operator, register, run, session_for, through_torch
from weft.ops.operator_call import end_entered, written
from weft.ops.replicated import Plain, shared
from weft.plan.matmul_all_reduce import MatmulAllReduce
from weft.run.session import Session
from weft.schedule import Schedule


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
    """Multiplies, and adds the products of all ranks on every rank. Each chunk is sent when it is
    made, and its sum is sent back as soon as it is complete.

    Equals::

        y = x @ w
        torch.distributed.all_reduce(y, op, group)

    but the sum is in the order of ranks and accumulated in float32 (float64 for float64), so that
    two runs, and all ranks, are equal to the last bit.

    Args:
        x: [M, K] of this rank, or [..., K]; ranks may differ in K.
        w: [K, N] of this rank, in the dtype of x or a narrower one (bfloat16, float16, int8). A
            narrower w is read in fewer bytes for up to 32 rows; for more rows it is converted.
        group: a torch.distributed group; None is all ranks.
        schedule: a name such as "adaptive@dma", a `Schedule`, or "auto".
        out: the tensor for y.
        reduce_op: "sum" or "avg".
        scale: [N] in float32, the factors of the columns of w; int8 needs it.

    For up to 32 rows, "auto" is `in-kernel`, unless serial is measured faster in the first calls:
    one kernel that sends each block of y when it is made. The owner of a block adds the parts and
    stores the sum into everyone's y. The kernel is fastest for a w with contiguous columns, such
    as `linear.weight.t()`. Another w is copied into that layout at its second call, and the copy
    is kept as long as w exists and is not written to (WEFT_PREPACK=0 turns this off). From 33 to
    256 rows in float32 it is `in-kernel:1`: one GEMM for the columns of each owner, stored into
    the memory of the owner, which adds.

    Returns:
        y: the sum, [M, N], on every rank.

    The gradient is that of tensor parallelism: y is one tensor that all ranks hold, and so is dy.
    So the backward pass is two local products (dx = dy @ w^T, dw = x^T @ dy), and nothing is sent.
    If every rank has a loss of its own, sum dy over the ranks first. A bias is added afterwards,
    once: `y + bias`.
    """
    graph = torch.compiler.is_compiling()
    if not graph:
        made = again(group, (OPERATOR.name, schedule, x, w, reduce_op, scale, out))
        if made is not None:
            return made
    if (graph or torch.is_grad_enabled() or modes.active()) and dispatched([x, w], out):
        name = group_name(group)
        y: torch.Tensor = through_torch(
            OPERATOR, x, w, reduce_op, name, scale, schedule=str(schedule)
        )
        return y
    return _run(session_for(group, x), x, w, reduce_op, schedule, out, scale)


def _run(
    session: Session,
    x: torch.Tensor,
    w: torch.Tensor,
    reduce_op: str,
    schedule: str | Schedule,
    out: torch.Tensor | None,
    scale: torch.Tensor | None,
) -> torch.Tensor:
    fabric = session.fabric
    with fabric.lock:
        arguments = (x, w, reduce_op, scale, out)
        key = key_of(OPERATOR.name, schedule, arguments)
        made: torch.Tensor | PeerOutput | None = None
        try:
            made = again_in_kernel(session, key, x, w, out, scale)
            if isinstance(made, torch.Tensor):
                if out is not None:
                    written(out)
                return made.div_(fabric.world) if reduce_op == "avg" else made
            y: torch.Tensor = run(OPERATOR, session, schedule, *arguments, output=made, key=key)
        except BaseException as error:
            if isinstance(made, PeerOutput):
                end_entered(fabric, error)
            raise
        return y


def _bind(
    session: Session,
    x: torch.Tensor,
    w: torch.Tensor,
    reduce_op: str,
    scale: torch.Tensor | None,
    out: torch.Tensor | None,
) -> Bound:
    both = isinstance(x, torch.Tensor) and isinstance(w, torch.Tensor)
    if both and w.dim() == 2 and x.dtype in DTYPES:
        check_weight(x, w, scale)
    bound = bind_sum(MatmulAllReduce, session, x, w, reduce_op, 0, None, out, any_weight=True)
    operands, adapt = bound.again, bound.adapt
    assert operands is not None
    assert adapt is not None

    def with_scale(
        x: torch.Tensor, w: torch.Tensor, _: str, scale: torch.Tensor | None, out: Any
    ) -> Operands:
        made = operands(x, w, out)
        if scale is not None:
            made.inputs["scale"] = scale
        return made

    return bound._replace(
        again=with_scale,
        adapt=lambda schedule, inputs: prepared(schedule, adapt(schedule, inputs)),
        after=lambda key, request: remember(session, key, request, x, w),
    )


def _kernel(
    a: torch.Tensor,
    b: torch.Tensor,
    reduce_op: str,
    group: str,
    scale: torch.Tensor | None = None,
    *,
    schedule: str = "auto",
) -> torch.Tensor:
    session = session_for(resolve_group(group), a)
    return _run(session, a, b, reduce_op, schedule, None, scale)


def _fake(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return resized(a, 0, a.shape[0], b.shape[1])


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Any
) -> None:
    x, w, reduce_op, group, scale = inputs
    ctx.save_for_backward(x, w, scale)
    ctx.group = group
    ctx.share = dist.get_world_size(resolve_group(group)) if reduce_op == "avg" else 1


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    x, w, scale = ctx.saved_tensors
    if torch.is_grad_enabled():  # for second derivatives: every rank uses dy in its own products
        dy = shared(dy, Plain(resolve_group(ctx.group)))
    if ctx.share > 1:
        dy = dy / ctx.share
    dx = dy @ widened(x, w, scale).t() if ctx.needs_input_grad[0] else None
    dw = None
    if ctx.needs_input_grad[1]:
        dw = (as_rows(x, 0)[0].t() @ as_rows(dy, 0)[0]).to(w.dtype)
        dw = dw if scale is None else (dw * scale).to(w.dtype)
    return dx, dw, None, None, None


OPERATOR = register(
    Operator(
        name="matmul_all_reduce",
        operation=MatmulAllReduce,
        bind=_bind,
        combine=combine_sum,
        schema="matmul_all_reduce(Tensor A, Tensor B, str reduce_op, str group_name, "
        'Tensor? scale=None, *, str schedule="auto") -> Tensor',
        kernel=_kernel,
        fake=_fake,
        casts=2,
        setup_context=_setup_context,
        backward=_backward,
        repeats=True,
    )
)
