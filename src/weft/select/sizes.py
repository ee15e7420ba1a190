"""The sizes of an operation for the rule: its form, and a few sizes of its busiest rank."""

from __future__ import annotations

from typing import Any, NamedTuple

from weft.errors import Unsupported
from weft.plan import gathering, scattering
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.plan.gather_contract import DEPTH, GatherContract
from weft.schedule import Schedule

GATHER, CONTRACT, SEND, SUM, SUM_EVERYWHERE = range(5)
"""The same numbers as in native/rule.cpp."""

_ADAPTIVE = Schedule.parse("adaptive@dma")


class NoRule(Unsupported):
    """The rule does not know an operation, e.g. one that was added from outside."""


class Sizes(NamedTuple):
    """`m` rows in all, `rows` from or to one peer. `cuts`: the default number of chunks of these
    rows for fixed schedules, for schedules in place, and for adaptive. `result`: the dtype of the
    result, if the operation names one."""

    form: int
    world: int
    m: int
    rows: int
    columns: tuple[int, ...]
    k: int
    dtype: str
    cuts: tuple[int, int, int]
    result: str | None = None


def sizes_of(operation: Any) -> Sizes:
    """The sizes of an operation that gathers and multiplies, or multiplies and sends."""
    return _sizes_of(operation)._replace(result=getattr(operation, "result", None))


def _sizes_of(operation: Any) -> Sizes:
    world, dtype = operation.world, operation.dtype
    if isinstance(operation, GatherContract):
        m = max(map(operation.received, range(world)))
        rows = max(rows for spans in operation.taken for _, rows in spans)
        columns = max(operation.columns, key=sum)
        return Sizes(CONTRACT, world, m, rows, columns, operation.k, dtype, (DEPTH, 1, DEPTH))
    if hasattr(operation, "spans"):
        if isinstance(operation, AllGatherMatmul):  # all ranks gather the same
            m, rows = operation.m, max(operation.rows)
        else:
            spans = [[size for _, size in operation.spans(rank)] for rank in range(world)]
            m, rows = max(map(sum, spans)), max(map(max, spans))
        cut = gathering.adaptive_depth(world, rows)
        columns = max(operation.columns, key=sum)
        return Sizes(GATHER, world, m, rows, columns, operation.k, dtype, (world, world, cut))
    if hasattr(operation, "summed"):
        made = [operation.sizes(rank) for rank in range(world)]
        form = SUM if operation.summed else SEND
        form = SUM_EVERYWHERE if operation.everywhere else form
        cut = scattering.default_depth(operation, _ADAPTIVE)
        m, rows = max(map(sum, made)), max(map(max, made))
        columns, k = (operation.n,), max(operation.inner)
        return Sizes(form, world, m, rows, columns, k, dtype, (world, world, cut))
    raise NoRule(f"there is no rule for {operation.name}; name a schedule")
