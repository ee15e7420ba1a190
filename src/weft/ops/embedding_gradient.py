"""The gradients of `embedding_all_to_all`. An exchange gives every rank the gradient of its bags
(`torch.ops.weft.embedding_gradient`), from which the gradients of tables and weights follow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.errors import Unsupported
from weft.fabric.host.bags import bags_of
from weft.fabric.proposal import Proposal
from weft.ops.embedding_inputs import Bagged, modes_of
from weft.ops.embedding_optimizer import TableOptimizer, apply
from weft.ops.modes import plain
from weft.ops.operands import dtype_name, resolve_group
from weft.ops.operator import Bound, Operator, register, run, session_for
from weft.plan.embedding_gradient import EmbeddingGradient
from weft.run.call import Tensors, check_tensor
from weft.run.results import empty_as
from weft.run.session import Session
from weft.schedule import Schedule
from weft.select.decide import Decision

Tensorlist = Sequence[torch.Tensor]
Gradients = list[torch.Tensor | None]


@dataclass(frozen=True)
class _Lookups:
    """The lookups in one table. bags: the gradient of its pooled rows."""

    table: torch.Tensor
    index: torch.Tensor
    offset: torch.Tensor
    weight: torch.Tensor | None
    mode: str
    bags: torch.Tensor

    def is_plain(self) -> bool:
        """Whether native code may make a gradient. It may not where torch must see what that is
        made from: in a compiled graph, or if a graph of the gradient is recorded."""
        tensors = (self.table, self.index, self.offset, self.weight, self.bags)
        return plain(tensors) and not torch.is_grad_enabled()

    def lengths(self) -> torch.Tensor:
        """The number of rows of every bag."""
        end = self.offset.new_tensor([self.index.shape[0]]).long()
        return torch.diff(self.offset.long(), append=end)

    def looked_up(self) -> torch.Tensor:
        """The gradient of what a bag adds up: rows, or shares of a mean."""
        if self.mode != "mean":
            return self.bags
        return self.bags / self.lengths().clamp(min=1)[:, None].to(self.bags.dtype)


def gradients(
    dy: torch.Tensor,
    tables: Tensorlist,
    indices: Tensorlist,
    offsets: Tensorlist,
    weights: Tensorlist | None,
    mode: str,
    sparse: bool,
    group: str,
    wants_tables: Sequence[bool],
    wants_weights: Sequence[bool],
) -> tuple[Gradients, Gradients]:
    """The gradients of tables and of per-sample weights that are wanted."""
    for_tables: Gradients = []
    for_weights: Gradients = []
    found = _exchanged(dy, tables, indices, offsets, weights, mode, group)
    for number, (wanted, one) in enumerate(zip(wants_tables, found, strict=True)):
        native = not sparse and one.mode != "max" and one.is_plain()
        wants_weight = bool(weights) and wants_weights[number]
        rows = _rows(one) if wants_weight or (wanted and not native) else None
        for_weights.append(_weight(one, rows) if rows is not None and wants_weight else None)
        if not wanted:
            for_tables.append(None)
        elif native:
            for_tables.append(_dense(one))
        else:
            assert rows is not None
            for_tables.append(_table(one.table, one.index.long(), _weighted(one, rows), sparse))
    return for_tables, for_weights if weights else []


def update(
    optimizer: TableOptimizer,
    dy: torch.Tensor,
    tables: Tensorlist,
    given: Bagged,
    mode: str,
    group: str,
    wants_weights: Sequence[bool],
) -> Gradients:
    """Updates the tables; returns the gradients of per-sample weights that are wanted."""
    made: Gradients = []
    weights = given.weights
    found = _exchanged(dy, tables, given.indices, given.offsets, weights, mode, group)
    for number, one in enumerate(found):
        rows = _rows(one)
        made.append(_weight(one, rows) if weights and wants_weights[number] else None)
        apply(optimizer, one.table, one.index.long(), _weighted(one, rows))
    return made if weights else []


def _exchanged(
    dy: torch.Tensor,
    tables: Tensorlist,
    indices: Tensorlist,
    offsets: Tensorlist,
    weights: Tensorlist | None,
    mode: str,
    group: str,
) -> Iterator[_Lookups]:
    """The lookups in every table, with the gradient that the ranks have exchanged."""
    dp = torch.ops.weft.embedding_gradient(dy, sum(table.shape[1] for table in tables), group)
    column, modes = 0, modes_of(mode, len(tables))
    for number, (table, index, offset) in enumerate(zip(tables, indices, offsets, strict=True)):
        dim = table.shape[1]
        bags = dp[: offset.shape[0], column : column + dim]
        column += dim
        yield _Lookups(
            table, index, offset, weights[number] if weights else None, modes[number], bags
        )


def _rows(one: _Lookups) -> torch.Tensor:
    """The gradient of each row that was looked up, without its weight."""
    count = one.offset.shape[0]
    bag = torch.repeat_interleave(torch.arange(count, device=one.offset.device), one.lengths())
    rows = one.looked_up()[bag]
    if one.mode == "max":
        rows = rows * _first_largest(one.table[one.index.long()], bag, count)
    return rows


def _weighted(one: _Lookups, rows: torch.Tensor) -> torch.Tensor:
    return rows if one.weight is None else rows * one.weight[:, None]


def _weight(one: _Lookups, rows: torch.Tensor) -> torch.Tensor:
    """The gradient of the weights."""
    assert one.weight is not None
    return (rows * one.table[one.index.long()]).sum(1).to(one.weight.dtype)


def _first_largest(values: torch.Tensor, bag: torch.Tensor, count: int) -> torch.Tensor:
    """Where a row has the largest value of its bag, column by column; of equal rows the first, as
    in torch."""
    spread = bag[:, None].expand_as(values)
    values = values.detach().float()
    most = values.new_full((count, values.shape[1]), float("-inf"))
    most = most.scatter_reduce(0, spread, values, "amax")
    place = torch.arange(values.shape[0], device=bag.device)[:, None].expand_as(values)
    never = values.shape[0]
    found = torch.where(values == most[bag], place, never)
    first = spread.new_full((count, values.shape[1]), never)
    first = first.scatter_reduce(0, spread, found, "amin")
    return first[bag] == place


def _dense(one: _Lookups) -> torch.Tensor:
    """The gradient of a table on the CPU, on all threads."""
    table, bags = one.table, one.looked_up()
    weights = None if one.weight is None else [one.weight]
    lookups = bags_of([table], [one.index], [one.offset], weights, ["sum"], bags.dtype)
    lookups.check()
    target = empty_as(table, table.shape)
    lookups.spread(0, bags, target)
    return target


def _table(
    table: torch.Tensor, index: torch.Tensor, rows: torch.Tensor, sparse: bool
) -> torch.Tensor:
    if sparse:
        return torch.sparse_coo_tensor(
            index[None], rows.to(table.dtype), tuple(table.shape), check_invariants=False
        )
    # Half precision would lose small terms when many are added to one row.
    total = torch.zeros(table.shape, dtype=torch.float32, device=table.device)
    return total.index_add_(0, index, rows.float()).to(table.dtype)


def _bind(session: Session, dy: torch.Tensor, columns: int) -> Bound:
    check_tensor("dy", dy, (2,))
    dy = dy.contiguous()
    dtype, world = dtype_name(dy.dtype), session.fabric.world
    same = (("columns of dY", dy.shape[1]), ("dtype", dtype))
    own = (("bags", dy.shape[0]), ("columns", columns))

    def outputs(operation: Any) -> Tensors:
        return {"dp": dy.new_empty(sum(operation.batch), columns)}

    return Bound(
        same,
        own,
        (*same, *own),
        lambda: EmbeddingGradient((dy.shape[0],) * world, (columns,) * world, dtype),
        {"dy": dy},
        lambda results: results["dp"],
        ("dy",),
        outputs,
    )


def _kernel(dy: torch.Tensor, columns: int, group: str) -> torch.Tensor:
    session = session_for(resolve_group(group), dy)
    dp: torch.Tensor = run(OPERATOR, session, None, dy, columns)
    return dp


def _combine(proposals: Sequence[Proposal]) -> EmbeddingGradient:
    own = [dict(p.own) for p in proposals]
    same = dict(proposals[0].same)
    bags = tuple(o["bags"] for o in own)
    return EmbeddingGradient(bags, tuple(o["columns"] for o in own), same["dtype"])


def _fake(dy: torch.Tensor, columns: int, group: str) -> torch.Tensor:
    return dy.new_empty(torch.library.get_ctx().new_dynamic_size(), columns)


def _backward(ctx: Any, ddp: torch.Tensor) -> tuple[Any, ...]:
    raise Unsupported(
        "weft.embedding_all_to_all has no second derivatives; call backward without create_graph"
    )


_SERIAL = Schedule.parse("serial")
_ALWAYS = Decision(
    _SERIAL.name,
    _SERIAL.name,
    _SERIAL,
    "columns of the gradient go back to where their tables are",
)

OPERATOR = register(
    Operator(
        name="embedding_gradient",
        operation=EmbeddingGradient,
        bind=_bind,
        combine=_combine,
        schema="embedding_gradient(Tensor dy, int columns, str group_name) -> Tensor",
        kernel=_kernel,
        fake=_fake,
        backward=_backward,
        asked=lambda schedule: _ALWAYS,
    )
)
