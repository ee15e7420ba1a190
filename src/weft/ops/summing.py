"""What `matmul_reduce_scatter` and `matmul_all_reduce` share: the call that multiplies and adds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist

from weft import fabric as fabrics
from weft.errors import Mismatch, Unsupported
from weft.fabric import HostFabric
from weft.fabric.landing import Landing
from weft.operation import split
from weft.ops.common import (
    DTYPES,
    as_rows,
    as_shaped,
    check_dim,
    check_operands,
    check_out,
    chosen_item,
    decide,
    dtype_name,
    num_rows,
    requested,
    spaces_of,
)
from weft.ops.few_rows import (
    Arguments,
    again,
    arguments_of,
    check_weight,
    few_rows,
    remember,
    widened,
)
from weft.ops.landed import carry_out_landed, in_kernel, landing_for
from weft.ops.packing import packed
from weft.plan.in_kernel import inbox_bytes
from weft.plan.matmul_all_reduce import FEW_ROWS, MatmulAllReduce, shares_columns
from weft.plan.matmul_reduce_scatter import MatmulReduceScatter
from weft.run.call import refuse
from weft.run.proposal import Proposal
from weft.schedule import Schedule
from weft.select.auto import Decision

_OPERATIONS = {kind.name: kind for kind in (MatmulReduceScatter, MatmulAllReduce)}


def summed(
    name: str,
    x: torch.Tensor,
    w: torch.Tensor,
    dim: int,
    reduce_op: str,
    group: dist.ProcessGroup | None,
    schedule: str | Schedule,
    own_rows: int | None,
    out: torch.Tensor | None,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum of the ranks' x @ w: this rank's rows of it, or for `matmul_all_reduce` all."""
    fabric = fabrics.of(group)
    if name != MatmulAllReduce.name:
        return _summed(
            fabric, name, x, w, dim, reduce_op, schedule, own_rows, out, scale, None, None
        )
    with fabric.lock:
        arguments = arguments_of(x, w, reduce_op, schedule, out, scale)
        made = None if arguments is None else again(fabric, arguments, x, w, out, scale)
        if isinstance(made, torch.Tensor):
            return made.div_(fabric.world) if reduce_op == "avg" else made
        return _summed(
            fabric, name, x, w, dim, reduce_op, schedule, own_rows, out, scale, arguments, made
        )


def _summed(
    fabric: HostFabric,
    name: str,
    x: torch.Tensor,
    w: torch.Tensor,
    dim: int,
    reduce_op: str,
    schedule: str | Schedule,
    own_rows: int | None,
    out: torch.Tensor | None,
    scale: torch.Tensor | None,
    arguments: Arguments | None,
    landing: Landing | None,
) -> torch.Tensor:
    """The same, looked at closely. arguments: by which the next call like this one is known again.
    landing: with which this rank has entered the call already, where it has."""
    everywhere = _OPERATIONS[name].everywhere
    entered = landing is not None
    given = x
    try:
        decision = requested(schedule)
        if everywhere and isinstance(x, torch.Tensor) and isinstance(w, torch.Tensor):
            m = math.prod(x.shape[:-1])  # not by way of numel: a rank's K may be 0
            decision = decision or few_rows(fabric, m, x.dtype)
            w, scale = _prepared(fabric, decision, x, w, scale, m)
        check_operands("x", x, [w], any_weight=everywhere)
        dim = check_dim("scatter_dim", dim, x)
        if reduce_op not in ("sum", "avg"):
            raise Unsupported(f"reduce_op must be 'sum' or 'avg', not {reduce_op!r}")
        rows, inner = as_rows(x, dim)
        one = num_rows(inner)
        m, n = rows.shape[0], w.shape[1]
        if own_rows is None:
            own = split(x.shape[dim], fabric.world)[fabric.rank] * one
        elif 0 <= own_rows <= x.shape[dim]:
            own = own_rows * one
        else:
            raise Unsupported(f"own_rows must be from 0 to {x.shape[dim]}, not {own_rows}")
        shape = (m if everywhere else own, n)
        if out is not None:
            check_out("out", out, x, [w], n, shape[0])
        sizes = _Sizes(name, m, n, rows.shape[1], own, x.dtype, reduce_op, inner)
    except Exception as error:
        refuse(fabric, name, error)
        raise
    if decision is None:
        decision = decide(fabric, name, sizes, lambda: _expected(sizes, fabric.world))
    try:
        proposal = _proposal(sizes, decision.said, decision.told)
        fused = in_kernel(fabric, decision)
        if fused:
            spaces = {"inbox": inbox_bytes(fabric.world, fabric.rank, m, n, dtype_name(x.dtype))}
            if landing is None:
                landing = landing_for(fabric, shape, x.dtype, out)
            else:
                landing = Landing(landing.tensor.view(shape), landing.offset)
            if rows.stride(1) != 1:
                rows = rows.contiguous()
        else:
            spaces = spaces_of(decision, fabric.world, m, own, n, dtype_name(x.dtype), True)
            if everywhere:
                spaces["reduced"] = _reduced(fabric, decision, m, own, n) * x.dtype.itemsize
                if "inbox" in spaces:
                    most = inbox_bytes(fabric.world, fabric.rank, m, n, dtype_name(x.dtype))
                    spaces["inbox"] = max(spaces["inbox"], most)
    except Exception as error:
        refuse(fabric, name, error)
        raise

    inputs = {"x": rows, "w": w}
    if scale is not None:
        inputs["scale"] = scale
    y = carry_out_landed(
        fabric, proposal, decision, inputs, _combine, spaces, landing, shape, x.dtype, out, entered
    )
    if fused and decision.observe is None:
        remember(fabric, arguments, proposal, decision.why, spaces["inbox"], given, n)
    if reduce_op == "avg":
        y.div_(fabric.world)
    return as_shaped(y, x, dim)


class _Sizes(NamedTuple):
    """All that a call's plan depends on, as this rank sees it."""

    name: str
    m: int
    n: int
    k: int
    own: int
    dtype: torch.dtype
    reduce_op: str
    inner: tuple[int, ...]


def _expected(sizes: _Sizes, world: int) -> MatmulReduceScatter:
    """The operation if peers have the sizes of this rank: near enough to choose a schedule by."""
    kind = _OPERATIONS[sizes.name]
    return kind(split(sizes.m, world), sizes.n, (sizes.k,) * world, dtype_name(sizes.dtype))


def _reduced(fabric: HostFabric, decision: Decision, m: int, own: int, n: int) -> int:
    """Elements of the sums that this rank passes on, under any schedule that it may be."""
    rows, columns = own * n, m * split(n, fabric.world)[fabric.rank]
    if decision.schedule is None or fabric.network:
        return max(rows, columns)
    return columns if shares_columns(decision.schedule, m, fabric.world) else rows


def _prepared(
    fabric: HostFabric,
    decision: Decision | None,
    x: torch.Tensor,
    w: torch.Tensor,
    scale: torch.Tensor | None,
    m: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """w as the schedule wants it: the kernel for few rows takes it in its own dtype and packed,
    all others in the dtype of x."""
    cpu = w.device.type == x.device.type == "cpu"
    if w.dim() != 2 or not cpu or x.dtype not in DTYPES:
        return w, None  # refused with the other checks
    check_weight(x, w, scale)
    fused = decision is not None and in_kernel(fabric, decision)
    if fused and m <= FEW_ROWS and x.dtype != torch.float64:
        return packed(w)[0], None if scale is None else scale.contiguous()
    return widened(x, w, scale), None


@lru_cache(maxsize=4096)
def _proposal(sizes: _Sizes, schedule: str, told: tuple[str, str] | None) -> Proposal:
    same = (
        ("M", sizes.m),
        ("N", sizes.n),
        ("dtype", dtype_name(sizes.dtype)),
        ("the schedule", schedule),
        ("reduce_op", sizes.reduce_op),
        ("the shape of x beside scatter_dim and K", sizes.inner),
    )
    own = (("rows", sizes.own), ("K", sizes.k), *chosen_item(told))
    return Proposal(sizes.name, same, own).checked()


def _combine(proposals: Sequence[Proposal]) -> MatmulReduceScatter:
    """The operation that the proposals of all ranks make together."""
    same = dict(proposals[0].same)
    own = [dict(p.own) for p in proposals]
    rows = tuple(o["rows"] for o in own)
    if sum(rows) != same["M"]:
        listed = ", ".join(map(str, rows))
        raise Mismatch(f"the ranks keep {listed} rows, which do not add up to the {same['M']} of x")
    kind = _OPERATIONS[proposals[0].operation]
    return kind(rows, same["N"], tuple(o["K"] for o in own), same["dtype"])
