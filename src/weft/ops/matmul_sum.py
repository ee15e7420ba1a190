"""Shared by `matmul_reduce_scatter` and `matmul_all_reduce`: products that are summed over
ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weft.errors import Mismatch, Unsupported
from weft.fabric.proposal import Proposal
from weft.operation import split
from weft.ops.known import Operands, Output
from weft.ops.operands import (
    as_rows,
    as_shaped,
    check_dim,
    check_operands,
    check_out,
    dtype_name,
    has_columns,
    num_rows,
    shared_workspaces,
)
from weft.ops.operator import Bound, in_kernel, into
from weft.plan.in_kernel import inbox_bytes
from weft.plan.matmul_all_reduce import MatmulAllReduce, shares_columns
from weft.plan.matmul_reduce_scatter import MatmulReduceScatter
from weft.run.call import Tensors
from weft.run.session import Session
from weft.schedule import Schedule
from weft.select.decide import AnySchedule
from weft.strategy import Strategy

_OPERATIONS = {kind.name: kind for kind in (MatmulReduceScatter, MatmulAllReduce)}


def bind_sum(
    kind: type[MatmulReduceScatter],
    session: Session,
    x: torch.Tensor,
    w: torch.Tensor,
    reduce_op: str,
    dim: int,
    own_rows: int | None,
    out: torch.Tensor | None,
    any_weight: bool = False,
) -> Bound:
    """Checks the arguments of a product that is summed over ranks. The result is this rank's rows
    of the sum, or all of it."""
    fabric, everywhere = session.fabric, kind.everywhere
    world, rank = fabric.world, fabric.rank
    check_operands("x", x, [w], any_weight=any_weight)
    dim = check_dim("scatter_dim", dim, x)
    if reduce_op not in ("sum", "avg"):
        raise Unsupported(f"reduce_op must be 'sum' or 'avg', not {reduce_op!r}")
    rows, inner = as_rows(x, dim)
    (m, k), n, dtype = rows.shape, w.shape[1], dtype_name(x.dtype)
    if own_rows is None:
        own = split(x.shape[dim], world)[rank] * num_rows(inner)
    elif isinstance(own_rows, int) and 0 <= own_rows <= x.shape[dim]:
        own = own_rows * num_rows(inner)
    else:
        raise Unsupported(f"own_rows must be from 0 to {x.shape[dim]}, not {own_rows!r}")
    shape, itemsize = (m if everywhere else own, n), x.dtype.itemsize
    if out is not None:
        check_out("out", out, x, [w], n, shape[0])

    def workspaces(schedule: AnySchedule | None) -> Mapping[str, int]:
        inbox = inbox_bytes(world, rank, m, n, dtype) if everywhere else 0
        if in_kernel(fabric, schedule):
            return {"inbox": inbox}
        assert not isinstance(schedule, Strategy)
        spaces = shared_workspaces(schedule, world, m, own, n, dtype, True)
        if everywhere:
            spaces["reduced"] = _reduced(schedule, m, own, n, world, rank) * itemsize
            if "inbox" in spaces:
                spaces["inbox"] = max(spaces["inbox"], inbox)
        return spaces

    def operands(x: torch.Tensor, w: torch.Tensor, *rest: Any) -> Operands:
        out = rest[-1]

        def result(made: Tensors) -> torch.Tensor:
            y = into(out, made["y"])
            if reduce_op == "avg":
                y.div_(world)
            return as_shaped(y, x, dim)

        inputs = {"x": as_rows(x, dim)[0], "w": w}
        return Operands(inputs, result, stored=Output(shape, x.dtype, out))

    same = (
        ("M", m),
        ("N", n),
        ("dtype", dtype),
        ("reduce_op", reduce_op),
        ("the shape of x beside scatter_dim and K", inner),
    )
    return Bound(
        same,
        (("rows", own), ("K", k)),
        (m, n, k, own, dtype, reduce_op, inner, has_columns(w)),
        lambda: kind(split(m, world), n, (k,) * world, dtype),
        workspaces=workspaces,
        adapt=_contiguous_rows,
        again=operands,
        as_made=reduce_op == "sum",
    )


def _contiguous_rows(schedule: Any, inputs: Tensors) -> Tensors:
    """Makes the rows of x contiguous, as kernels need them."""
    x = inputs["x"]
    if isinstance(schedule, Schedule) and schedule.fusion == "kernel" and x.stride(1) != 1:
        return {**inputs, "x": x.contiguous()}
    return inputs


def _reduced(schedule: Schedule | None, m: int, own: int, n: int, world: int, rank: int) -> int:
    """The elements of the sums that this rank sends on, for a schedule, or for None, for any."""
    rows, columns = own * n, m * split(n, world)[rank]
    if schedule is None:
        return max(rows, columns)
    return columns if shares_columns(schedule, m, world) else rows


def combine_sum(proposals: Sequence[Proposal]) -> MatmulReduceScatter:
    """Makes the operation from the proposals of all ranks."""
    same = dict(proposals[0].same)
    own = [dict(p.own) for p in proposals]
    rows = tuple(o["rows"] for o in own)
    if sum(rows) != same["M"]:
        listed = ", ".join(map(str, rows))
        raise Mismatch(f"the ranks keep {listed} rows, which do not add up to the {same['M']} of x")
    kind = _OPERATIONS[proposals[0].operation]
    return kind(rows, same["N"], tuple(o["K"] for o in own), same["dtype"])
