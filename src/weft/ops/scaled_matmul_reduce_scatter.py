"""`weft.scaled_matmul_reduce_scatter` and `torch.ops.weft.scaled_matmul_reduce_scatter`: float8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from weft.dtype import name_of
from weft.errors import Unsupported
from weft.fabric.proposal import Proposal
from weft.operation import split
from weft.ops.float8_operands import (
    check_bias,
    check_eight,
    check_result_scale,
    decided_as,
    w_scales,
    x_scales,
)
from weft.ops.operands import (
    as_rows,
    as_shaped,
    check_dim,
    group_name,
    num_rows,
    resized,
    resolve_group,
    shared_workspaces,
)
from weft.ops.operator import Bound, Operator, Output, register, run, session_for
from weft.plan.matmul_reduce_scatter import MatmulReduceScatter
from weft.run.call import Tensors
from weft.run.scaled import Scales
from weft.run.session import Session
from weft.schedule import Schedule
from weft.select.decide import AnySchedule
from weft.strategy import Strategy


def scaled_matmul_reduce_scatter(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    *,
    reduce_op: str = "sum",
    scatter_dim: int = 0,
    group: dist.ProcessGroup | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
    schedule: str | Schedule = "auto",
) -> torch.Tensor:
    """Multiplies float8 operands with their scales, adds the products of all ranks, and returns to
    each rank its rows of the sum. Each chunk is sent when it is made.

    Equals, if M is divided evenly::

        y = torch.empty(x.shape[0] // world, N)
        product = torch._scaled_mm(x, w, x_scale, w_scale, bias, out_dtype=out_dtype)
        torch.distributed.reduce_scatter_tensor(y, product, op, group)

    but the sum is in the order of ranks and accumulated in float32.

    Args:
        x: [M, K] of this rank in float8, or [..., K].
        w: [K, N] of this rank in float8.
        x_scale: one number, or one for each row of x, [..., 1]; ranks may differ.
        w_scale: one number, or one for each column of w, [1, N].
        reduce_op: "sum" or "avg".
        scatter_dim: the dimension of x that is divided among the ranks.
        group: a torch.distributed group; None is all ranks.
        bias: [N], added to the product of this rank, as in torch.
        out_dtype: bfloat16, float16 or float32: of the result, and of what travels.
        use_fast_accum: as in torch; weft always sums in float32.
        schedule: a name such as "adaptive@dma", a `Schedule`, or "auto".

    Returns:
        y: this rank's rows of the sum. It has no backward.
    """
    # Only a graph needs torch's dispatcher, which would refuse wrong types on this rank alone.
    compiling = torch.compiler.is_compiling()
    carry_out = torch.ops.weft.scaled_matmul_reduce_scatter if compiling else _kernel
    y: torch.Tensor = carry_out(
        x,
        w,
        x_scale,
        w_scale,
        reduce_op,
        scatter_dim,
        group_name(group),
        bias,
        None,
        out_dtype,
        use_fast_accum,
        schedule=str(schedule),
    )
    return y


def _bind(
    session: Session,
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    reduce_op: str,
    scatter_dim: int,
    bias: torch.Tensor | None,
    result_scale: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> Bound:
    world, rank = session.fabric.world, session.fabric.rank
    dtype = check_eight("x", x, [w], [out_dtype])
    rows_scale = x_scales("x_scale", x_scale, x)
    check_bias(bias, w.shape[1])
    check_result_scale(result_scale)
    dim = check_dim("scatter_dim", scatter_dim, x)
    if reduce_op not in ("sum", "avg"):
        raise Unsupported(f"reduce_op must be 'sum' or 'avg', not {reduce_op!r}")
    rows, inner = as_rows(x, dim)
    scales = Scales(
        x_scale.reshape(1, 1) if rows_scale is None else as_rows(rows_scale, dim)[0],
        w_scales("w_scale", w_scale, w),
        bias,
    )
    (m, k), n, result_name = rows.shape, w.shape[1], name_of(out_dtype)
    own = split(x.shape[dim], world)[rank] * num_rows(inner)

    def workspaces(schedule: AnySchedule | None) -> Mapping[str, int]:
        assert not isinstance(schedule, Strategy)
        return shared_workspaces(schedule, world, m, own, n, result_name, True)

    def result(made: Tensors) -> torch.Tensor:
        y = made["y"]
        if reduce_op == "avg":
            y.div_(world)
        return as_shaped(y, x, dim)

    same = (
        ("M", m),
        ("N", n),
        ("dtype", dtype),
        ("out_dtype", result_name),
        ("reduce_op", reduce_op),
        ("the shape of x beside scatter_dim and K", inner),
    )
    return Bound(
        same,
        (("rows", own), ("K", k)),
        (m, n, k, own, dtype, result_name, reduce_op, inner),
        lambda: MatmulReduceScatter(split(m, world), n, (k,) * world, decided_as(x)),
        {"x": rows, "w": w, "scales": cast(torch.Tensor, scales)},  # only products read them
        result,
        stored=Output((own, n), out_dtype, None),
        workspaces=workspaces,
    )


def _combine(proposals: Sequence[Proposal]) -> MatmulReduceScatter:
    same = dict(proposals[0].same)
    own = [dict(p.own) for p in proposals]
    rows, inner = (tuple(o[name] for o in own) for name in ("rows", "K"))
    return MatmulReduceScatter(rows, same["N"], inner, same["dtype"], same["out_dtype"])


def _kernel(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    reduce_op: str,
    scatter_dim: int,
    group: str,
    bias: torch.Tensor | None = None,
    result_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    *,
    schedule: str = "auto",
) -> torch.Tensor:
    session, kind = session_for(resolve_group(group), a), out_dtype or torch.bfloat16
    given = (a, b, a_scale, b_scale, reduce_op, scatter_dim, bias, result_scale, kind)
    y: torch.Tensor = run(OPERATOR, session, schedule, *given)
    return y.contiguous()


def _fake(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    reduce_op: str,
    scatter_dim: int,
    group: str,
    bias: torch.Tensor | None = None,
    result_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    *,
    schedule: str = "auto",
) -> torch.Tensor:
    found: Any = resolve_group(group)
    own = split(a.shape[scatter_dim], dist.get_world_size(found))[dist.get_rank(found)]
    return resized(a, scatter_dim, own, b.shape[1]).to(out_dtype or torch.bfloat16)


OPERATOR = register(
    Operator(
        name="scaled_matmul_reduce_scatter",
        operation=MatmulReduceScatter,
        bind=_bind,
        combine=_combine,
        schema="scaled_matmul_reduce_scatter(Tensor A, Tensor B, Tensor A_scale, Tensor B_scale, "
        "str reduce_op, int scatter_dim, str group_name, Tensor? bias=None, "
        "Tensor? result_scale=None, ScalarType? out_dtype=None, bool use_fast_accum=False, *, "
        'str schedule="auto") -> Tensor',
        kernel=_kernel,
        fake=_fake,
    )
)
