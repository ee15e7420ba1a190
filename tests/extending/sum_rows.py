"""An operator in one file outside the package: every rank gets the sum of all ranks' x.

It is what CONTRIBUTING.md calls a new operator: the operation with its lowering and its proof, the
function that users call, and what `weft run` measures.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.distributed as dist

from weft.dtype import ITEM_BYTES
from weft.errors import InvalidPlan
from weft.measure import arms
from weft.operation import register as register_operation
from weft.ops.operator import Bound, Operator, register, run, session_for
from weft.plan.builder import Builder, refuse_impossible
from weft.plan.contents import Data
from weft.plan.tasks import Region
from weft.schedule import Schedule

NAME = "sum_rows"


@register_operation
@dataclass(frozen=True)
class SumRows:
    """Y = the sum of X over all ranks, on every rank."""

    rows: int
    columns: int
    world: int
    dtype: str = "float32"

    name = NAME

    @classmethod
    def of(cls, m, n, k, world, dtype="float32"):
        return cls(m, n, world, dtype)

    @property
    def label(self):
        return f"{NAME} of {self.rows}x{self.columns} {self.dtype} on {self.world} ranks"

    def num_flops(self, rank):
        return self.rows * self.columns * (self.world - 1)

    def num_bytes(self, source, target):
        return 0 if source == target else self.rows * self.columns * ITEM_BYTES[self.dtype]

    def compute_only(self):
        return replace(self, world=1)

    def refuses(self, schedule):
        if schedule.serial or (schedule.fusion == "unfused" and schedule.cut == "rows"):
            return "nothing is read in place" if schedule.engine == "direct" else None
        return "chunks of rows are added one by one; use hetero-unfused-1d"

    def lower(self, schedule):
        return lower(self, schedule)

    def check(self, plan, contents):
        for rank in range(self.world):
            held = contents.of(rank, "y")
            for piece in held:
                at = (piece.row, piece.column)
                if not isinstance(piece.value, Data) or (piece.value.row, piece.value.column) != at:
                    raise InvalidPlan(f"y@{rank} holds {piece.value} at {at}")
            added = sum(piece.rows * piece.columns for piece in held)
            if added != self.rows * self.columns * self.world:
                raise InvalidPlan(f"y@{rank} adds {added} elements")


@lru_cache
def lower(op, schedule):
    refuse_impossible(schedule, op.refuses(schedule))
    builder = Builder(op, schedule)
    depth = 1 if schedule.serial else schedule.depth or op.world
    for rank in range(op.world):
        builder.add_buffer("x", rank, op.rows, op.columns, "input")
        builder.add_buffer("y", rank, op.rows, op.columns, "output")
        for peer in range(op.world):
            if peer != rank:
                builder.add_buffer(f"inbox{peer}", rank, op.rows, op.columns, "workspace")
    for rank in range(op.world):
        for chunk in range(depth):
            row, end = (op.rows * part // depth for part in (chunk, chunk + 1))
            where = (row, end - row, 0, op.columns)
            sources, copies = [], []
            for peer in range(op.world):
                source = Region(rank, "x" if peer == rank else f"inbox{peer}", *where)
                sources.append(source)
                if peer != rank:
                    remote = Region(peer, "x", *where)
                    label = f"x{peer}.{chunk}"
                    copies.append(builder.copy(rank, remote, source, peer=peer, label=label))
            target = Region(rank, "y", *where)
            builder.reduce(rank, sources, [target], after=copies, label=f"y.{chunk}")
    return builder.plan()


def sum_rows(x, *, group=None, schedule="auto"):
    """The sum of x over the ranks of a group."""
    return run(OPERATOR, session_for(group, x), schedule, x)


def _bind(session, x):
    op = SumRows(*x.shape, session.fabric.world, str(x.dtype).removeprefix("torch."))
    return Bound(
        same=(("rows", op.rows), ("columns", op.columns), ("dtype", op.dtype)),
        own=(),
        key=op,
        expected=lambda: op,
        inputs={"x": x.contiguous()},
        result=lambda results: results["y"],
        shared=("x",),
        outputs=lambda operation: {"y": torch.empty_like(x)},
    )


def _combine(proposals):
    same = dict(proposals[0].same)
    return SumRows(same["rows"], same["columns"], len(proposals), same["dtype"])


OPERATOR = register(Operator(NAME, SumRows, _bind, _combine))


@arms.register(NAME)
def _arms(operation, make):
    x = make.tensor(operation.rows, operation.columns)
    total = x.clone()

    def plain():
        total.copy_(x)
        dist.all_reduce(total)

    return arms.Arms(
        lambda: torch.add(x, x, out=total),
        lambda: sum_rows(x, schedule="serial"),
        lambda schedule: lambda: sum_rows(x, schedule=schedule),
        plain,
    )


__all__ = ["Schedule", "SumRows", "sum_rows"]
