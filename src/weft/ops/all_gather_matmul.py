"""`weft.all_gather_matmul` and `torch.ops.weft.all_gather_matmul`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
import torch.distributed as dist

from weft.errors import Mismatch, Unsupported
from weft.fabric.proposal import PEERS_DECIDE, Proposal
from weft.operation import is_split
from weft.ops import gather_contract as _gather_contract  # noqa: F401 - its operator is used
from weft.ops.aliasing import check_apart
from weft.ops.known import Operands, again
from weft.ops.operands import (
    as_rows,
    as_shaped,
    check_dim,
    check_group_rank,
    check_operands,
    check_out,
    dispatched,
    dtype_name,
    group_name,
    has_columns,
    listed_sizes,
    named,
    num_rows,
    resized,
    resolve_group,
)
from weft.ops.operator import Bound, Operator, register, run, session_for, through_torch
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.run.call import Tensors
from weft.run.results import empty_as
from weft.run.session import Session
from weft.schedule import Schedule
from weft.select.decision import for_gradient

BESIDE = "the shape of x_shard beside gather_dim and K"


@overload
def all_gather_matmul(
    x_shard: torch.Tensor,
    w: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = ...,
    schedule: str | Schedule = ...,
    out: torch.Tensor | None = ...,
    return_gathered: Literal[False] = ...,
    gather_dim: int = ...,
    shard_rows: Sequence[int] | None = ...,
) -> torch.Tensor: ...
@overload
def all_gather_matmul(
    x_shard: torch.Tensor,
    w: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = ...,
    schedule: str | Schedule = ...,
    out: torch.Tensor | None = ...,
    return_gathered: Literal[True],
    gather_dim: int = ...,
    shard_rows: Sequence[int] | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def all_gather_matmul(
    x_shard: torch.Tensor,
    w: Sequence[torch.Tensor],
    *,
    group: dist.ProcessGroup | None = ...,
    schedule: str | Schedule = ...,
    out: Sequence[torch.Tensor] | None = ...,
    return_gathered: Literal[False] = ...,
    gather_dim: int = ...,
    shard_rows: Sequence[int] | None = ...,
) -> list[torch.Tensor]: ...
@overload
def all_gather_matmul(
    x_shard: torch.Tensor,
    w: Sequence[torch.Tensor],
    *,
    group: dist.ProcessGroup | None = ...,
    schedule: str | Schedule = ...,
    out: Sequence[torch.Tensor] | None = ...,
    return_gathered: Literal[True],
    gather_dim: int = ...,
    shard_rows: Sequence[int] | None = ...,
) -> tuple[list[torch.Tensor], torch.Tensor]: ...
def all_gather_matmul(
    x_shard: torch.Tensor,
    w: torch.Tensor | Sequence[torch.Tensor],
    *,
    group: dist.ProcessGroup | None = None,
    schedule: str | Schedule = "auto",
    out: torch.Tensor | Sequence[torch.Tensor] | None = None,
    return_gathered: bool = False,
    gather_dim: int = 0,
    shard_rows: Sequence[int] | None = None,
) -> (
    torch.Tensor
    | list[torch.Tensor]
    | tuple[torch.Tensor, torch.Tensor]
    | tuple[list[torch.Tensor], torch.Tensor]
):
    """Gathers x over the ranks of a group and multiplies it by w; the communication overlaps the
    matmul.

    Equals, for shards of equal size::

        x = torch.empty(world * x_shard.shape[0], K)
        torch.distributed.all_gather_into_tensor(x, x_shard, group)
        y = x @ w                                  # or [x @ one for one in w]

    Args:
        x_shard: [rows, K] of this rank, or [..., K] with the gathered dimension `gather_dim`. The
            shards may be an uneven split, as `tensor_split` or `chunk` would give.
        w: [K, N], or several of them, e.g. [w_q, w_k, w_v].
        group: a torch.distributed group; None is all ranks.
        schedule: a name such as "adaptive@dma", a `Schedule`, or "auto".
        out: the tensor for y, [M, N], or one for each w.
        return_gathered: whether to return the gathered x too.
        gather_dim: the dimension of x that is sharded over the ranks.
        shard_rows: the size of `gather_dim` on every rank. Needed if it is not an even split and,
            in compiled graphs, if it is not equal on all ranks.

    Returns:
        y [M, N], or a list of them if w is a list; with `return_gathered`, (y, x).

    The backward is overlapped as well: `matmul_reduce_scatter` for x, and for w a matmul that
    gathers x along its K. A bias of this rank's columns is added afterwards: `y + bias`.
    """
    several = isinstance(w, (list, tuple))
    weights = list(w) if several else [w]
    outs: Any = out if out is None or several else [out]
    if isinstance(outs, tuple):
        outs = list(outs)
    arguments = (x_shard, weights, gather_dim, return_gathered, shard_rows, outs)
    if not several and not torch.compiler.is_compiling():
        made = again(group, (OPERATOR.name, schedule, *arguments))
        if made is not None:
            return made
    if dispatched([x_shard, *weights], out):
        gathered, ys = through_torch(
            OPERATOR,
            x_shard,
            weights,
            gather_dim,
            group_name(group),
            return_A=return_gathered,
            schedule=str(schedule),
            shard_rows=shard_rows,
        )
    else:
        gathered, ys = run(OPERATOR, session_for(group, x_shard), schedule, *arguments)
    y = ys if several else ys[0]
    return (y, gathered) if return_gathered else y


def _bind(
    session: Session,
    x_shard: torch.Tensor,
    weights: list[torch.Tensor],
    gather_dim: int,
    return_gathered: bool,
    shard_rows: Sequence[int] | None,
    outs: list[torch.Tensor] | None,
) -> Bound:
    fabric = session.fabric
    check_operands("x_shard", x_shard, weights)
    dim = check_dim("gather_dim", gather_dim, x_shard)
    x, inner = as_rows(x_shard, dim)
    rows, k = x.shape
    dtype = dtype_name(x.dtype)
    columns = tuple([w.shape[1] for w in weights])
    out_rows = None
    if outs is not None:
        _check_outs(outs, weights, x_shard)
        out_rows = tuple(out.shape[0] for out in outs)
    declared = None
    if shard_rows is not None:
        one = num_rows(inner)
        declared = tuple(n * one for n in listed_sizes("shard_rows", shard_rows))
        check_group_rank("shard_rows", declared, fabric.world, fabric.rank, rows)

    def expected() -> AllGatherMatmul:
        # A size below 0 may be any; the size of this rank is the best guess.
        world = fabric.world
        every = tuple(n if n >= 0 else rows for n in declared or (rows,) * world)
        return AllGatherMatmul(every, (columns,) * world, k, dtype, return_gathered)

    def operands(x_shard: torch.Tensor, weights: list[torch.Tensor], *rest: Any) -> Operands:
        x, outs = as_rows(x_shard, dim)[0].contiguous(), rest[-1]

        def outputs(operation: Any) -> Tensors:
            made: Tensors = {}
            for i, n in enumerate(columns):
                made[f"y{i}"] = empty_as(x, (operation.m, n)) if outs is None else outs[i]
            if return_gathered:
                made["gathered"] = empty_as(x, (operation.m, k))
            return made

        def result(made: Tensors) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
            gathered = as_shaped(made["gathered"], x_shard, dim) if return_gathered else None
            if outs is not None:
                return gathered, outs
            return gathered, [as_shaped(made[f"y{i}"], x_shard, dim) for i in range(len(columns))]

        inputs = {"x": x}
        for i, weight in enumerate(weights):
            inputs[f"w{i}"] = weight
        return Operands(inputs, result, outputs)

    same = (
        ("K", k),
        ("dtype", dtype),
        ("the number of w", len(columns)),
        ("return_gathered", return_gathered),
        (BESIDE, inner),
        ("shard_rows", declared),
        (PEERS_DECIDE, declared is None),
    )
    own = (("rows", rows), ("columns", columns), ("out", out_rows))
    layouts = tuple(map(has_columns, weights))
    key = (rows, columns, k, dtype, return_gathered, inner, declared, out_rows, layouts)
    return Bound(same, own, key, expected, shared=("x",), again=operands)


def _combine(proposals: Sequence[Proposal]) -> AllGatherMatmul:
    same = dict(proposals[0].same)
    own = [dict(p.own) for p in proposals]
    rows = tuple(o["rows"] for o in own)
    columns = tuple(tuple(o["columns"]) for o in own)
    if same["shard_rows"] is None:
        inner = num_rows(same[BESIDE])
        sizes = tuple(n // inner for n in rows)
        _check_split("rows of x_shard", sizes, "; if this is meant, say so with shard_rows=[...]")
        for i in range(same["the number of w"]):
            name = "w" if same["the number of w"] == 1 else f"w[{i}]"
            _check_split(f"columns of {name}", tuple(c[i] for c in columns), "")
    for rank, o in enumerate(own):
        for out_rows in o["out"] or ():
            if out_rows != sum(rows):
                raise Mismatch(
                    f"out on rank {rank} has {out_rows} rows, but the result has {sum(rows)}"
                )
    return AllGatherMatmul(rows, columns, same["K"], same["dtype"], same["return_gathered"])


def _check_split(what: str, sizes: tuple[int, ...], hint: str) -> None:
    if not is_split(sizes):
        listed = ", ".join(str(size) for size in sizes)
        raise Mismatch(f"ranks disagree on the {what}: {listed} is not an even split{hint}")


def _check_outs(
    outs: list[torch.Tensor], weights: list[torch.Tensor], x_shard: torch.Tensor
) -> None:
    if not isinstance(outs, list):
        raise Unsupported(
            f"out must be a list with one tensor for each w, not {type(outs).__name__}"
        )
    if len(outs) != len(weights):
        raise Unsupported(f"out has {len(outs)} tensors for {len(weights)} w; give one for each")
    listed = named("out", outs)
    for i, ((name, out), weight) in enumerate(zip(listed, weights, strict=True)):
        check_out(name, out, x_shard, weights, weight.shape[1], x_name="x_shard")
        check_apart(name, out, listed[:i])


def _fake(
    a_shard: torch.Tensor,
    bs: list[torch.Tensor],
    gather_dim: int,
    group: str,
    *,
    return_A: bool = False,  # noqa: N803 - the name in torch.ops.symm_mem
    shard_rows: Sequence[int] | None = None,
    **_: Any,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    rows = a_shard.shape[gather_dim] * dist.get_world_size(resolve_group(group))
    if shard_rows is not None:
        if min(shard_rows) < 0:
            raise Unsupported("a compiled graph must know shard_rows of every rank")
        rows = sum(shard_rows)
    gathered = resized(a_shard, gather_dim, rows, a_shard.shape[-1]) if return_A else None
    return gathered, [resized(a_shard, gather_dim, rows, b.shape[1]) for b in bs]


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Any
) -> None:
    x, weights, ctx.gather_dim, ctx.group = inputs
    ctx.save_for_backward(x, *weights)
    ctx.schedule = for_gradient(keyword_only_inputs["schedule"])


def _backward(ctx: Any, gathered: torch.Tensor | None, ys: list[torch.Tensor]) -> tuple[Any, ...]:
    """dX = reduce_scatter(sum of dY_i @ W_i^T), dW_i = all_gather(X)^T @ dY_i."""
    x, *weights = ctx.saved_tensors
    left, right = list(ys), [w.t() for w in weights]
    if gathered is not None:
        # The gathered x is a result, too. Its gradient joins the sum as a product with the
        # identity.
        left.append(gathered)
        right.append(torch.eye(x.shape[-1], dtype=x.dtype, device=x.device))
    dx = torch.ops.weft.matmul_reduce_scatter(
        torch.cat(left, -1),
        torch.cat(right),
        "sum",
        ctx.gather_dim,
        ctx.group,
        schedule=ctx.schedule,
        own_rows=x.shape[ctx.gather_dim],
    )
    flat = [as_rows(y, ctx.gather_dim)[0] for y in ys]
    dws = torch.ops.weft.gather_contract(
        as_rows(x, ctx.gather_dim)[0], flat, None, None, ctx.group, schedule=ctx.schedule
    )
    return dx, dws, None, None


OPERATOR = register(
    Operator(
        name="all_gather_matmul",
        operation=AllGatherMatmul,
        bind=_bind,
        combine=_combine,
        schema="all_gather_matmul(Tensor A_shard, Tensor[] Bs, int gather_dim, str group_name, *, "
        'bool return_A=False, str schedule="auto", int[]? shard_rows=None) -> (Tensor?, Tensor[])',
        fake=_fake,
        casts=2,
        setup_context=_setup_context,
        backward=_backward,
        repeats=True,
    )
)
