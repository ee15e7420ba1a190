"""`weft.all_gather_matmul` and `torch.ops.weft.all_gather_matmul`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, overload

import torch
import torch.distributed as dist

from weft import fabric as fabrics
from weft.errors import Mismatch, Unsupported
from weft.fabric import HostFabric
from weft.operation import is_split
from weft.ops import gather_contract as _gather_contract  # noqa: F401 - its operator is used
from weft.ops.common import (
    as_rows,
    as_shaped,
    check_dim,
    check_group_rank,
    check_operands,
    check_out,
    chosen_item,
    decide,
    define,
    dispatched,
    dtype_name,
    group_name,
    num_rows,
    requested,
    resized,
    resolve_group,
)
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.plan.tasks import Plannable
from weft.run.call import Tensors, carry_out, refuse
from weft.run.proposal import Proposal
from weft.schedule import Schedule

NAME = "all_gather_matmul"
BESIDE = "the shape of x_shard beside gather_dim and K"


@overload
def all_gather_matmul(
    x_shard: torch.Tensor,
    w: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = ...,
    schedule: str | Schedule = ...,
    out: torch.Tensor | None = ...,
    return_gathered: bool = ...,
    gather_dim: int = ...,
    shard_rows: Sequence[int] | None = ...,
) -> Any: ...
@overload
def all_gather_matmul(
    x_shard: torch.Tensor,
    w: Sequence[torch.Tensor],
    *,
    group: dist.ProcessGroup | None = ...,
    schedule: str | Schedule = ...,
    out: Sequence[torch.Tensor] | None = ...,
    return_gathered: bool = ...,
    gather_dim: int = ...,
    shard_rows: Sequence[int] | None = ...,
) -> Any: ...
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
) -> Any:
    """Gathers x over the ranks of a group and multiplies it by w, the one hidden behind the other.

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
        out: where to put y: [M, N], or one for each w.
        return_gathered: whether to return the gathered x too.
        gather_dim: the dimension of x that is cut over the ranks.
        shard_rows: the size of `gather_dim` on every rank, where it is not an even split; in
            compiled graphs, where it is not equal on all ranks.

    Returns:
        y [M, N], or a list of them where w is a list; with `return_gathered`, (y, x).

    The backward is overlapped as well: `matmul_reduce_scatter` for x, and for w a matmul that
    gathers x along its K. A bias of this rank's columns is added outside: `y + bias`.
    """
    several = isinstance(w, (list, tuple))
    weights = list(w) if several else [w]
    if dispatched([x_shard, *weights], out):
        gathered, ys = torch.ops.weft.all_gather_matmul(
            x_shard,
            weights,
            gather_dim,
            group_name(group),
            return_A=return_gathered,
            schedule=str(schedule),
            shard_rows=shard_rows,
        )
    else:
        outs = None if out is None else list(out) if several else [out]
        gathered, ys = _run(
            x_shard,
            weights,  # type: ignore[arg-type]
            gather_dim,
            group,
            return_gathered,
            schedule,
            shard_rows,
            outs,  # type: ignore[arg-type]
        )
    y = ys if several else ys[0]
    return (y, gathered) if return_gathered else y


def _run(
    x_shard: torch.Tensor,
    weights: list[torch.Tensor],
    gather_dim: int,
    group: dist.ProcessGroup | None,
    return_gathered: bool,
    schedule: str | Schedule,
    shard_rows: Sequence[int] | None,
    outs: list[torch.Tensor] | None,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    fabric = fabrics.of(group)
    try:
        decision = requested(schedule)
        check_operands("x_shard", x_shard, weights)
        gather_dim = check_dim("gather_dim", gather_dim, x_shard)
        x, inner = as_rows(x_shard, gather_dim)
        x = x.contiguous()
        if outs is not None:
            _check_outs(outs, weights, x_shard)
        sizes = _sizes(fabric, x, weights, inner, return_gathered, shard_rows, outs)
    except Exception as error:
        refuse(fabric, NAME, error)
        raise
    if decision is None:
        decision = decide(fabric, NAME, sizes, lambda: _expected(sizes, fabric.world))
    try:
        proposal = _proposal(sizes, decision.said, decision.told)
    except Exception as error:
        refuse(fabric, NAME, error)
        raise
    inputs = {"x": x, **{f"w{i}": weight for i, weight in enumerate(weights)}}

    def outputs(operation: Plannable, rank: int) -> Tensors:
        assert isinstance(operation, AllGatherMatmul)
        made: Tensors = {}
        for i, weight in enumerate(weights):
            shape = (operation.m, weight.shape[1])
            made[f"y{i}"] = x.new_empty(shape) if outs is None else outs[i]
        if operation.gathered:
            made["gathered"] = x.new_empty(operation.m, operation.k)
        return made

    results = carry_out(
        fabric,
        proposal,
        decision.schedule,
        decision.why,
        inputs,
        ("x",),
        _combine,
        outputs,
        observe=decision.observe,
    )
    gathered = as_shaped(results["gathered"], x_shard, gather_dim) if return_gathered else None
    if outs is not None:
        return gathered, outs
    return gathered, [as_shaped(results[f"y{i}"], x_shard, gather_dim) for i in range(len(weights))]


class _Sizes(NamedTuple):
    """All that a call's plan depends on, as this rank sees it."""

    rows: int
    columns: tuple[int, ...]
    out_rows: tuple[int, ...] | None
    k: int
    dtype: torch.dtype
    gathered: bool
    inner: tuple[int, ...]
    declared: tuple[int, ...] | None


def _sizes(
    fabric: HostFabric,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    inner: tuple[int, ...],
    gathered: bool,
    shard_rows: Sequence[int] | None,
    outs: list[torch.Tensor] | None,
) -> _Sizes:
    rows_of_one = num_rows(inner)
    declared = None if shard_rows is None else tuple(int(n) * rows_of_one for n in shard_rows)
    if declared is not None:
        check_group_rank("shard_rows", declared, fabric.world, fabric.rank, x.shape[0])
    columns = tuple(w.shape[1] for w in weights)
    out_rows = None if outs is None else tuple(out.shape[0] for out in outs)
    return _Sizes(x.shape[0], columns, out_rows, x.shape[1], x.dtype, gathered, inner, declared)


def _expected(sizes: _Sizes, world: int) -> AllGatherMatmul:
    """The operation if peers have the sizes of this rank: near enough to choose a schedule by."""
    # A size that the caller leaves open (below 0) may be any; this rank's is the best guess.
    rows = tuple(n if n >= 0 else sizes.rows for n in sizes.declared or (sizes.rows,) * world)
    columns = (sizes.columns,) * world
    return AllGatherMatmul(rows, columns, sizes.k, dtype_name(sizes.dtype), sizes.gathered)


@lru_cache(maxsize=4096)
def _proposal(sizes: _Sizes, schedule: str, told: tuple[str, str] | None) -> Proposal:
    same = (
        ("K", sizes.k),
        ("dtype", dtype_name(sizes.dtype)),
        ("the number of w", len(sizes.columns)),
        ("the schedule", schedule),
        ("return_gathered", sizes.gathered),
        (BESIDE, sizes.inner),
        ("shard_rows", sizes.declared),
    )
    own = (("rows", sizes.rows), ("columns", sizes.columns), ("out", sizes.out_rows))
    return Proposal(NAME, same, (*own, *chosen_item(told))).checked()


def _combine(proposals: Sequence[Proposal]) -> AllGatherMatmul:
    """The operation that the proposals of all ranks make together."""
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
    if len(outs) != len(weights):
        raise Unsupported(f"out has {len(outs)} tensors for {len(weights)} w; give one for each")
    for i, (out, weight) in enumerate(zip(outs, weights, strict=True)):
        name = "out" if len(outs) == 1 else f"out[{i}]"
        check_out(name, out, x_shard, weights, weight.shape[1], x_name="x_shard")


def _kernel(
    a_shard: torch.Tensor,
    bs: list[torch.Tensor],
    gather_dim: int,
    group: str,
    *,
    return_A: bool = False,  # noqa: N803 - the name in torch.ops.symm_mem
    schedule: str = "auto",
    shard_rows: Sequence[int] | None = None,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    gathered, ys = _run(
        a_shard, list(bs), gather_dim, resolve_group(group), return_A, schedule, shard_rows, None
    )
    # A graph needs every result in the layout that the fake kernel promised.
    return None if gathered is None else gathered.contiguous(), [y.contiguous() for y in ys]


def _fake(
    a_shard: torch.Tensor,
    bs: list[torch.Tensor],
    gather_dim: int,
    group: str,
    *,
    return_A: bool = False,  # noqa: N803
    schedule: str = "auto",
    shard_rows: Sequence[int] | None = None,
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
    ctx.schedule = keyword_only_inputs["schedule"]


def _backward(ctx: Any, gathered: torch.Tensor | None, ys: list[torch.Tensor]) -> tuple[Any, ...]:
    """dX = reduce_scatter(sum of dY_i @ W_i^T), dW_i = all_gather(X)^T @ dY_i."""
    x, *weights = ctx.saved_tensors
    left, right = list(ys), [w.t() for w in weights]
    if gathered is not None:
        # The gathered x is a result, too: its gradient joins the sum as a product with 1.
        left.append(gathered)
        right.append(torch.eye(x.shape[-1], dtype=x.dtype))
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


define(
    "all_gather_matmul(Tensor A_shard, Tensor[] Bs, int gather_dim, str group_name, *, "
    'bool return_A=False, str schedule="auto", int[]? shard_rows=None) -> (Tensor?, Tensor[])',
    _kernel,
    _fake,
    _backward,
    _setup_context,
)
