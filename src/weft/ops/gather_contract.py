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
from weft.ops.common import check_splits, choose, define, dtype_name, match_splits, resolve_group
from weft.plan.gather_contract import GatherContract
from weft.plan.tasks import Plannable
from weft.run.call import Tensors, carry_out, check_tensor, refuse
from weft.run.proposal import Proposal
from weft.schedule import Schedule

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
        chosen, why = choose(fabric, schedule)
        chosen = _possible(chosen)
        proposal = _propose(fabric.world, a, ds, in_splits, out_splits, chosen)
    except Exception as error:
        refuse(fabric, NAME, error)
        raise
    inputs = {"x": a.contiguous(), **{f"d{i}": d for i, d in enumerate(ds)}}

    def outputs(operation: Plannable, rank: int) -> Tensors:
        return {f"g{i}": a.new_empty(a.shape[1], d.shape[1]) for i, d in enumerate(ds)}

    results = carry_out(fabric, proposal, chosen, why, inputs, ("x",), _combine, outputs)
    return [results[f"g{i}"] for i in range(len(ds))]


def _possible(schedule: Schedule) -> Schedule:
    """The schedule itself, or the one nearest to it that can add in a fixed order."""
    if schedule.serial or (schedule.fusion == "unfused" and schedule.cut == "rows"):
        return schedule
    return Schedule.parse("hetero-unfused-1d").with_engine(schedule.engine)


def _propose(
    world: int,
    a: torch.Tensor,
    ds: Sequence[torch.Tensor],
    in_splits: Sequence[int] | None,
    out_splits: Sequence[int] | None,
    schedule: Schedule,
) -> Proposal:
    check_tensor("x", a, (2,))
    rows = ds[0].shape[0] if ds else 0
    for d in ds:
        check_tensor("d", d, (2,))
        if d.shape[0] != rows or d.dtype != a.dtype:
            raise Unsupported("every d must have as many rows as are gathered, and the dtype of x")
    splits = None
    if in_splits is not None or out_splits is not None:
        splits = (
            check_splits("in_splits", in_splits, world, a.shape[0]),
            check_splits("out_splits", out_splits, world, rows),
        )
    same = (
        ("K", a.shape[1]),
        ("dtype", dtype_name(a.dtype)),
        ("the number of d", len(ds)),
        ("whether rows are split", splits is not None),
        ("the schedule", str(schedule)),
    )
    columns = tuple(d.shape[1] for d in ds)
    own = (("rows", a.shape[0]), ("gathered", rows), ("columns", columns), ("splits", splits))
    return Proposal(NAME, same, own).checked()


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
