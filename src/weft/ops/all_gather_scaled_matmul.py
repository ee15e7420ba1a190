"""`weft.all_gather_scaled_matmul` and `torch.ops.weft.all_gather_scaled_matmul`: float8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, overload

import torch
import torch.distributed as dist

from weft.errors import Unsupported
from weft.fabric.proposal import Proposal
from weft.ops import all_gather_matmul as plain
from weft.ops.float8_operands import (
    by_rows,
    check_bias,
    check_eight,
    check_result_scale,
    decided_as,
    result_dtypes,
    w_scales,
    x_scales,
)
from weft.ops.operands import (
    as_rows,
    as_shaped,
    check_dim,
    group_name,
    resized,
    resolve_group,
)
from weft.ops.operator import Bound, Operator, register, run, session_for
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.run.call import Tensors
from weft.run.results import empty_as
from weft.run.session import Session
from weft.schedule import Schedule

SUMS = "float32"
"""The products grow in this dtype; scales are applied to the whole result."""


@overload
def all_gather_scaled_matmul(
    x_shard: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    *,
    gather_dim: int = ...,
    group: dist.ProcessGroup | None = ...,
    bias: torch.Tensor | None = ...,
    out_dtype: torch.dtype = ...,
    use_fast_accum: bool = ...,
    schedule: str | Schedule = ...,
    return_gathered: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def all_gather_scaled_matmul(
    x_shard: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    *,
    gather_dim: int = ...,
    group: dist.ProcessGroup | None = ...,
    bias: torch.Tensor | None = ...,
    out_dtype: torch.dtype = ...,
    use_fast_accum: bool = ...,
    schedule: str | Schedule = ...,
    return_gathered: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def all_gather_scaled_matmul(
    x_shard: torch.Tensor,
    w: Sequence[torch.Tensor],
    x_scale: torch.Tensor,
    w_scale: Sequence[torch.Tensor],
    *,
    gather_dim: int = ...,
    group: dist.ProcessGroup | None = ...,
    bias: Sequence[torch.Tensor | None] | None = ...,
    out_dtype: torch.dtype = ...,
    use_fast_accum: bool = ...,
    schedule: str | Schedule = ...,
    return_gathered: Literal[False] = ...,
) -> list[torch.Tensor]: ...
@overload
def all_gather_scaled_matmul(
    x_shard: torch.Tensor,
    w: Sequence[torch.Tensor],
    x_scale: torch.Tensor,
    w_scale: Sequence[torch.Tensor],
    *,
    gather_dim: int = ...,
    group: dist.ProcessGroup | None = ...,
    bias: Sequence[torch.Tensor | None] | None = ...,
    out_dtype: torch.dtype = ...,
    use_fast_accum: bool = ...,
    schedule: str | Schedule = ...,
    return_gathered: Literal[True],
) -> tuple[list[torch.Tensor], torch.Tensor]: ...
def all_gather_scaled_matmul(
    x_shard: torch.Tensor,
    w: torch.Tensor | Sequence[torch.Tensor],
    x_scale: torch.Tensor,
    w_scale: torch.Tensor | Sequence[torch.Tensor],
    *,
    gather_dim: int = 0,
    group: dist.ProcessGroup | None = None,
    bias: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
    schedule: str | Schedule = "auto",
    return_gathered: bool = False,
) -> (
    torch.Tensor
    | list[torch.Tensor]
    | tuple[torch.Tensor, torch.Tensor]
    | tuple[list[torch.Tensor], torch.Tensor]
):
    """Gathers float8 rows over the ranks of a group and multiplies them by a float8 w, with scales;
    the communication, of one byte per element, overlaps the matmul.

    Equals, for shards of equal size and one scale per row::

        x, s = all_gather(x_shard), all_gather(x_scale)
        y = torch._scaled_mm(x, w, s, w_scale, bias, out_dtype=out_dtype)

    Args:
        x_shard: [rows, K] of this rank in float8, or [..., K]; the shards are an even split.
        w: [K, N] in float8, or several of them.
        x_scale: one number, the same on all ranks, or one for each row of x_shard, [..., 1].
        w_scale: one number, or one for each column of w, [1, N]; a list if w is one.
        gather_dim: the dimension of x that is sharded over the ranks.
        group: a torch.distributed group; None is all ranks.
        bias: [N], added to the scaled product; a list if w is one.
        out_dtype: bfloat16, float16 or float32.
        use_fast_accum: as in torch; weft always sums in float32.
        schedule: a name such as "adaptive@dma", a `Schedule`, or "auto".
        return_gathered: whether to return the gathered x too.

    Returns:
        y [M, N], or a list of them if w is a list; with `return_gathered`, (y, x). It has no
        backward.
    """
    several = isinstance(w, (list, tuple))
    ws, scales = _listed(w), _listed(w_scale)
    biases: list[Any] = [None] * len(ws) if bias is None else _listed(bias)
    # Only a graph needs torch's dispatcher, which would refuse wrong types on this rank alone.
    compiling = torch.compiler.is_compiling()
    carry_out = torch.ops.weft.all_gather_scaled_matmul if compiling else _kernel
    gathered, ys = carry_out(
        x_shard,
        ws,
        x_scale,
        scales,
        gather_dim,
        group_name(group),
        biases,
        [None] * len(ws),
        [out_dtype] * len(ws),
        [use_fast_accum] * len(ws),
        schedule=str(schedule),
    )
    y: Any = ys if several else ys[0]
    return (y, gathered) if return_gathered else y


def _listed(one_or_several: Any) -> list[Any]:
    several = isinstance(one_or_several, (list, tuple))
    return list(one_or_several) if several else [one_or_several]


def _bind(
    session: Session,
    x_shard: torch.Tensor,
    weights: list[torch.Tensor],
    gather_dim: int,
    scales: list[torch.Tensor],
    x_scale: torch.Tensor,
    biases: list[torch.Tensor | None],
    result_scales: list[object],
    out_dtypes: list[torch.dtype],
) -> Bound:
    dtype = check_eight("x_shard", x_shard, weights, out_dtypes)
    x_scales("x_scale", x_scale, x_shard)
    if not len(weights) == len(scales) == len(biases):
        raise Unsupported("give one w_scale, and one bias if any, for each w")
    for scale, weight, bias in zip(scales, weights, biases, strict=True):
        w_scales("w_scale", scale, weight)
        check_bias(bias, weight.shape[1])
    for given in result_scales:
        check_result_scale(given)
    dim = check_dim("gather_dim", gather_dim, x_shard)
    x, inner = as_rows(x_shard, dim)
    x = x.contiguous()
    (rows, k), world = x.shape, session.fabric.world
    columns = tuple(weight.shape[1] for weight in weights)

    def expected() -> AllGatherMatmul:
        kind = decided_as(x)
        return AllGatherMatmul((rows,) * world, (columns,) * world, k, kind, True)

    def outputs(operation: Any) -> Tensors:
        made = {
            f"y{i}": empty_as(x, (operation.m, n), torch.float32) for i, n in enumerate(columns)
        }
        return {**made, "gathered": empty_as(x, (operation.m, k))}

    def result(made: Tensors) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return made["gathered"], [made[f"y{i}"] for i in range(len(columns))]

    same = (
        ("K", k),
        ("dtype", dtype),
        ("the number of w", len(columns)),
        ("return_gathered", True),
        (plain.BESIDE, inner),
        ("shard_rows", None),
        ("scales of rows", by_rows(x_scale, x_shard)),
    )
    own = (("rows", rows), ("columns", columns), ("out", None))
    inputs = {"x": x, **{f"w{i}": weight for i, weight in enumerate(weights)}}
    key = (rows, columns, k, dtype, inner)
    return Bound(same, own, key, expected, inputs, result, ("x",), outputs)


def _combine(proposals: Sequence[Proposal]) -> AllGatherMatmul:
    operation = plain.OPERATOR.combine(proposals)
    assert isinstance(operation, AllGatherMatmul)
    return replace(operation, result=SUMS)


def _kernel(
    a_shard: torch.Tensor,
    bs: list[torch.Tensor],
    a_scale: torch.Tensor,
    b_scales: list[torch.Tensor],
    gather_dim: int,
    group: str,
    biases: list[torch.Tensor | None],
    result_scales: list[torch.Tensor | None],
    out_dtypes: list[torch.dtype | int | None],
    use_fast_accum: list[bool],
    *,
    schedule: str = "auto",
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    session = session_for(resolve_group(group), a_shard)
    kinds = result_dtypes(out_dtypes)
    gathered, sums = run(
        OPERATOR,
        session,
        schedule,
        a_shard,
        list(bs),
        gather_dim,
        list(b_scales),
        a_scale,
        list(biases),
        list(result_scales),
        kinds,
    )
    rows = a_scale
    if by_rows(a_scale, a_shard):
        scales = a_scale.expand(*a_shard.shape[:-1], 1)
        mine, _ = as_rows(scales, gather_dim % a_shard.dim())
        one = torch.ones(1, 1, device=mine.device)
        rows = run(plain.OPERATOR, session, "serial", mine, [one], 0, True, None, None)[0]
    dim, ys = gather_dim % a_shard.dim(), []
    for y, weight, scale, bias, kind in zip(sums, bs, b_scales, biases, kinds, strict=True):
        y *= rows
        y *= w_scales("w_scale", scale, weight)
        if bias is not None:
            y += bias
        ys.append(as_shaped(y.to(kind), a_shard, dim).contiguous())
    return as_shaped(gathered, a_shard, dim).contiguous(), ys


def _fake(
    a_shard: torch.Tensor,
    bs: list[torch.Tensor],
    a_scale: torch.Tensor,
    b_scales: list[torch.Tensor],
    gather_dim: int,
    group: str,
    biases: list[torch.Tensor | None],
    result_scales: list[torch.Tensor | None],
    out_dtypes: list[torch.dtype | int | None],
    use_fast_accum: list[bool],
    *,
    schedule: str = "auto",
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    rows = a_shard.shape[gather_dim] * dist.get_world_size(resolve_group(group))
    gathered = resized(a_shard, gather_dim, rows, a_shard.shape[-1])
    ys = [
        resized(a_shard, gather_dim, rows, b.shape[1]).to(kind)
        for b, kind in zip(bs, result_dtypes(out_dtypes), strict=True)
    ]
    return gathered, ys


OPERATOR = register(
    Operator(
        name="all_gather_scaled_matmul",
        operation=AllGatherMatmul,
        bind=_bind,
        combine=_combine,
        schema="all_gather_scaled_matmul(Tensor A_shard, Tensor[] Bs, Tensor A_scale, "
        "Tensor[] B_scales, int gather_dim, str group_name, Tensor?[] biases, "
        "Tensor?[] result_scales, ScalarType?[] out_dtypes, bool[] use_fast_accum, *, "
        'str schedule="auto") -> (Tensor, Tensor[])',
        kernel=_kernel,
        fake=_fake,
    )
)
