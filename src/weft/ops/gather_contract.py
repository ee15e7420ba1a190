"""`torch.ops.weft.gather_contract`: the weight gradients of the operators that gather first.

Equals, without splits (and for shards of equal size)::

    torch.distributed.all_gather_into_tensor(x, x_shard, group)
    gs = [x.t() @ d for d in ds]

and with splits the same after `torch.distributed.all_to_all_single(x, x_shard, out, in, group)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft.errors import Mismatch, Unsupported
from weft.fabric.proposal import Proposal
from weft.ops.known import Operands
from weft.ops.operands import (
    bucket_of,
    check_splits,
    dtype_name,
    match_splits,
    resolve_group,
)
from weft.ops.operator import Bound, Operator, register
from weft.plan.gather_contract import GatherContract, refuses
from weft.run.call import check_tensor
from weft.run.results import empty_as
from weft.run.session import Session
from weft.select.decide import inherited, requested


def _bind(
    session: Session,
    a: torch.Tensor,
    ds: list[torch.Tensor],
    in_splits: Sequence[int] | None,
    out_splits: Sequence[int] | None,
    out: None,
) -> Bound:
    world = session.fabric.world
    splits = _check(world, a, ds, in_splits, out_splits)
    columns = tuple(d.shape[1] for d in ds)
    rows, k, dtype = a.shape[0], a.shape[1], dtype_name(a.dtype)
    taken = (rows,) * world if splits is None else splits[1]

    def expected() -> GatherContract:
        spans = tuple((0, rows) for rows in taken)
        return GatherContract(taken, (spans,) * world, k, (columns,) * world, dtype)

    def operands(a: torch.Tensor, ds: list[torch.Tensor], *_: Any) -> Operands:
        inputs = {"x": a.contiguous(), **{f"d{i}": d for i, d in enumerate(ds)}}
        return Operands(
            inputs,
            lambda made: [made[f"g{i}"] for i in range(len(columns))],
            lambda _: {f"g{i}": empty_as(a, (k, n)) for i, n in enumerate(columns)},
        )

    same = (
        ("K", k),
        ("dtype", dtype),
        ("the number of d", len(ds)),
        ("whether rows are split", splits is not None),
    )
    gathered = ds[0].shape[0] if ds else 0
    own = (("rows", rows), ("gathered", gathered), ("columns", columns), ("splits", splits))
    sizes = (rows,) if splits is None else bucket_of(sum(taken), max(taken))
    key = (sizes, columns, k, dtype)
    return Bound(same, own, key, expected, shared=("x",), work=sum(taken), again=operands)


def _check(
    world: int,
    a: torch.Tensor,
    ds: Sequence[torch.Tensor],
    in_splits: Sequence[int] | None,
    out_splits: Sequence[int] | None,
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The checked splits, if there are any."""
    check_tensor("x", a, (2,))
    rows = ds[0].shape[0] if ds else 0
    for d in ds:
        check_tensor("d", d, (2,))
        if d.shape[0] != rows or d.dtype != a.dtype:
            raise Unsupported("every d must have as many rows as are gathered, and the dtype of x")
    if in_splits is None and out_splits is None:
        return None
    return (
        check_splits("in_splits", in_splits, world, a.shape[0]),
        check_splits("out_splits", out_splits, world, rows),
    )


def _combine(proposals: Sequence[Proposal]) -> GatherContract:
    same = dict(proposals[0].same)
    own = [dict(p.own) for p in proposals]
    rows = tuple(o["rows"] for o in own)
    if same["whether rows are split"]:
        splits = match_splits([o["splits"] for o in own])
        taken = tuple(
            tuple((sum(sizes[:rank]), sizes[rank]) for sizes in splits)
            for rank in range(len(splits))
        )
    else:
        taken = (tuple((0, size) for size in rows),) * len(rows)
    for rank, o in enumerate(own):
        gathered = sum(size for _, size in taken[rank])
        if o["columns"] and o["gathered"] != gathered:
            raise Mismatch(
                f"the d of rank {rank} has {o['gathered']} rows, but {gathered} are gathered"
            )
    columns = tuple(tuple(o["columns"]) for o in own)
    return GatherContract(rows, taken, same["K"], columns, same["dtype"])


def _fake(
    a: torch.Tensor,
    ds: list[torch.Tensor],
    in_splits: Sequence[int] | None,
    out_splits: Sequence[int] | None,
    group: str,
    **_: Any,
) -> list[torch.Tensor]:
    return [a.new_empty(a.shape[1], d.shape[1]) for d in ds]


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Any
) -> None:
    x, ds, ctx.in_splits, ctx.out_splits, ctx.group = inputs
    ctx.save_for_backward(x, *ds)
    ctx.schedule = keyword_only_inputs["schedule"]


def _backward(ctx: Any, gs: list[torch.Tensor]) -> tuple[Any, ...]:
    """dX = sum of D_i @ dG_i^T, back to where the rows came from; dD_i = gathered(X) @ dG_i. These
    are second derivatives."""
    x, *ds = ctx.saved_tensors
    left, right = torch.cat(ds, -1), torch.cat([g.t() for g in gs])
    if ctx.in_splits is not None:
        dx = torch.ops.weft.matmul_all_to_all(
            left, right, ctx.out_splits, ctx.in_splits, ctx.group, schedule=ctx.schedule
        )
        _, y = torch.ops.weft.all_to_all_matmul(
            x, torch.cat(gs, -1), ctx.in_splits, ctx.out_splits, ctx.group, schedule=ctx.schedule
        )
        return dx, list(y.split([d.shape[1] for d in ds], -1)), None, None, None
    dx = torch.ops.weft.matmul_reduce_scatter(
        left, right, "sum", 0, ctx.group, schedule=ctx.schedule, own_rows=x.shape[0]
    )
    any_rows = [-1] * dist.get_world_size(resolve_group(ctx.group))
    _, dds = torch.ops.weft.all_gather_matmul(
        x, gs, 0, ctx.group, schedule=ctx.schedule, shard_rows=any_rows
    )
    return dx, dds, None, None, None


OPERATOR = register(
    Operator(
        name="gather_contract",
        operation=GatherContract,
        bind=_bind,
        combine=_combine,
        schema="gather_contract(Tensor A, Tensor[] Ds, int[]? in_splits, int[]? out_splits, "
        'str group_name, *, str schedule="auto") -> Tensor[]',
        fake=_fake,
        casts=2,
        setup_context=_setup_context,
        backward=_backward,
        asked=lambda schedule: inherited(requested(schedule), refuses),
        repeats=True,
    )
)
