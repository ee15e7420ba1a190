"""`torch.ops.weft.gather_contract`: the weight gradients of the operators that gather first.

Equals, without splits (and for shards of equal size)::

    torch.distributed.all_gather_into_tensor(x, x_shard, group)
    gs = [x.t() @ d for d in ds]

and with splits the same after `torch.distributed.all_to_all_single(x, x_shard, out, in, group)`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft import fabric as fabrics
from weft.errors import Mismatch, Unsupported
from weft.ops.common import (
    bucket_of,
    check_splits,
    chosen_item,
    decide,
    define,
    dtype_name,
    match_splits,
    requested,
    resolve_group,
)
from weft.plan.gather_contract import GatherContract
from weft.plan.tasks import Plannable
from weft.run.call import Tensors, carry_out, check_tensor, refuse
from weft.run.proposal import Proposal
from weft.schedule import Schedule
from weft.select.auto import Decision

NAME = "gather_contract"


def _kernel(
    a: torch.Tensor,
    ds: list[torch.Tensor],
    in_splits: Sequence[int] | None,
    out_splits: Sequence[int] | None,
    group: str,
    *,
    schedule: str = "auto",
) -> list[torch.Tensor]:
    fabric = fabrics.of(resolve_group(group))
    try:
        decision = _possible(requested(schedule))
        splits = _check(fabric.world, a, ds, in_splits, out_splits)
        columns = tuple(d.shape[1] for d in ds)
        rows, k, dtype = a.shape[0], a.shape[1], dtype_name(a.dtype)
    except Exception as error:
        refuse(fabric, NAME, error)
        raise
    if decision is None:
        taken = (rows,) * fabric.world if splits is None else splits[1]
        sizes = (rows,) if splits is None else bucket_of(sum(taken), max(taken))
        key = (sizes, columns, k, dtype)
        decision = decide(
            fabric, NAME, key, lambda: _expected(taken, columns, k, dtype), sum(taken)
        )
    try:
        same = (
            ("K", k),
            ("dtype", dtype),
            ("the number of d", len(ds)),
            ("whether rows are split", splits is not None),
            ("the schedule", decision.said),
        )
        gathered = ds[0].shape[0] if ds else 0
        own = (("rows", rows), ("gathered", gathered), ("columns", columns), ("splits", splits))
        proposal = Proposal(NAME, same, (*own, *chosen_item(decision.told))).checked()
    except Exception as error:
        refuse(fabric, NAME, error)
        raise
    inputs = {"x": a.contiguous(), **{f"d{i}": d for i, d in enumerate(ds)}}

    def outputs(operation: Plannable, rank: int) -> Tensors:
        return {f"g{i}": a.new_empty(a.shape[1], d.shape[1]) for i, d in enumerate(ds)}

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
    return [results[f"g{i}"] for i in range(len(ds))]


def _possible(decision: Decision | None) -> Decision | None:
    """What was asked for, or the schedule nearest to it that can add in a fixed order."""
    if decision is None or decision.schedule is None:
        return decision
    schedule = decision.schedule
    if schedule.serial or (schedule.fusion == "unfused" and schedule.cut == "rows"):
        return decision
    nearest = Schedule.parse("hetero-unfused-1d").with_engine(schedule.engine)
    return decision._replace(said=nearest.name, schedule=nearest)


def _check(
    world: int,
    a: torch.Tensor,
    ds: Sequence[torch.Tensor],
    in_splits: Sequence[int] | None,
    out_splits: Sequence[int] | None,
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The checked splits, where there are any."""
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


def _expected(
    taken: tuple[int, ...], columns: tuple[int, ...], k: int, dtype: str
) -> GatherContract:
    """The operation if all ranks take what this rank takes: near enough to choose a schedule by."""
    world = len(taken)
    spans = tuple((0, rows) for rows in taken)
    return GatherContract(taken, (spans,) * world, k, (columns,) * world, dtype)


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
    *,
    schedule: str = "auto",
) -> list[torch.Tensor]:
    return [a.new_empty(a.shape[1], d.shape[1]) for d in ds]


define(
    "gather_contract(Tensor A, Tensor[] Ds, int[]? in_splits, int[]? out_splits, str group_name, "
    '*, str schedule="auto") -> Tensor[]',
    _kernel,
    _fake,
)
