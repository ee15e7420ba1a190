"""`weft.embedding_all_to_all`: the forms of its arguments, and updates in the backward pass. Its
operator is in `embedding_call.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from weft.errors import Unsupported
from weft.ops.embedding_call import OPERATOR, call
from weft.ops.embedding_checks import Tables
from weft.ops.embedding_gradient import update
from weft.ops.embedding_inputs import Bagged, Shards, bagged, mode_text, modes_of
from weft.ops.embedding_optimizer import TableOptimizer
from weft.ops.operands import dispatched, group_name
from weft.ops.operator import session_for
from weft.run.call import refusal
from weft.schedule import Schedule


def embedding_all_to_all(
    tables: Tables,
    indices: Any,
    offsets: Tables | None = None,
    *,
    lengths: Any = None,
    mode: str | Sequence[str] = "sum",
    per_sample_weights: Any = None,
    include_last_offset: bool | None = None,
    row_splits: Sequence[Sequence[int]] | None = None,
    optimizer: TableOptimizer | None = None,
    sparse: bool = False,
    group: dist.ProcessGroup | None = None,
    schedule: str | Schedule = "auto",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Looks up embeddings in tables on different ranks, and gives every rank the pooled rows of all
    tables for its part of the batch, as a recommendation model (DLRM) does between its tables and
    its layers.

    Equals::

        pooled = [embedding_bag(i, t, o, mode=mode) for t, i, o in zip(tables, indices, offsets)]
        mine = torch.cat(pooled, 1)                           # [B, the columns of my tables]
        parts = [torch.empty(my_bags, columns[r]) for r in ranks]
        torch.distributed.all_to_all(parts, list(mine.tensor_split(world)), group)
        y = torch.cat(parts, 1)

    but every pooled row is stored directly into the y of the rank that needs it, those of peers
    first, so that nothing is packed, sent and unpacked.

    Args:
        tables: the tables of this rank, [rows, dim] each, contiguous, float32, bfloat16 or float16.
            Dims and dtypes may differ, and a rank may have no table.
        indices: for every table the row numbers of all bags, one bag after the other; int32 or
            int64. An index out of range is refused, on every rank. With `lengths`, also one tensor
            for all tables. A KeyedJaggedTensor (an object with values() and lengths(), in the
            order of the tables) is taken as it is.
        offsets: for every table the start of each of the B bags of the whole batch in `indices`, as
            for `torch.nn.EmbeddingBag`; B is the same for all tables and ranks.
        lengths: instead of offsets, the number of rows of each bag: [tables, B], flat, or a list.
        mode: "sum", "mean" or "max", or a list with one for every table; an empty bag is zero.
        per_sample_weights: for every table the factor of each row; for "sum" only.
        include_last_offset: whether every offsets tensor has B + 1 numbers, the last of which is
            the number of indices. Without it such a tensor has B + 1 bags, as in torch. This
            cannot be told from an empty last bag, so it is an error only if tables or ranks then
            disagree on B. None warns if the last bag of every table is empty.
        row_splits: tables are distributed by rows: for every table, the number of rows of each
            rank, and `tables` are the rows of this rank. Every rank passes all bags with row
            numbers of the whole table, and y has each table once. Tables that are not distributed
            need a call of their own.
        optimizer: updates tables in the backward pass, each row once, instead of giving them
            gradients: `weft.nn.SGDInBackward`, `weft.nn.RowWiseAdagradInBackward`.
        sparse: whether gradients of tables are sparse tensors.
        group: a torch.distributed group; None is all ranks.
        schedule: a name such as "serial@dma", a `Schedule`, or "auto". This is "in-kernel" and,
            between machines, "hetero-unfused-1d:8", which sends slices of the batch when they are
            ready.
        out: the tensor for y; if it is in shared memory (`weft.symmetric_empty`), peers store
            there.

    Returns:
        y [bags of this rank, columns of all tables], in shared memory: of B bags, rank r gets the
        r-th part of `tensor_split`; columns are in the order of ranks and their tables. Tables of
        several dtypes give the dtype that torch promotes them to.

    Sums are accumulated in float32. The backward pass is the reverse exchange, so every rank calls
    it; a rank whose tables need no gradient still takes part if it has a loss.
    """
    first = tables[0] if isinstance(tables, Sequence) and len(tables) else None
    shards = None
    try:
        if not isinstance(tables, Sequence):
            raise Unsupported("tables must be a list with one tensor per table")
        count = len(tables)
        if not isinstance(mode, str):
            modes_of(mode, count)  # raises unless it is a list of modes
        given = bagged(count, indices, offsets, lengths, per_sample_weights, include_last_offset)
        if row_splits is not None:
            fabric = session_for(group, first).fabric
            modes = modes_of(mode, count)
            shards = Shards(tables, given, row_splits, modes, fabric.rank, fabric.world)
            if out is not None:
                raise Unsupported("out= cannot be used with row_splits; use the returned tensor")
            given, mode = shards.given, shards.pooling
    except Exception as error:
        refused = refusal(error)
        session_for(group, first).fabric.refuse(OPERATOR.name, refused)
        raise refused from refused.__cause__
    y = _called(tables, given, mode_text(mode), optimizer, sparse, group, schedule, out)
    return y if shards is None else shards.joined(y)


def _called(
    tables: Tables,
    given: Bagged,
    mode: str,
    optimizer: TableOptimizer | None,
    sparse: bool,
    group: dist.ProcessGroup | None,
    schedule: str | Schedule,
    out: torch.Tensor | None,
) -> torch.Tensor:
    indices, offsets, weights = given
    if optimizer is not None and torch.is_grad_enabled():
        anchor = torch.empty(0, requires_grad=True)
        made: torch.Tensor = _Updated.apply(  # type: ignore[no-untyped-call]
            anchor, tables, given, mode, optimizer, group, str(schedule), *(weights or ())
        )
        return made
    anchored = _anchored(tables, out)
    if anchored is not None:
        tables, indices, offsets = anchored
        mode = "sum," if mode.endswith(",") or not mode else mode
    listed = [*_listed(tables), *_listed(indices), *_listed(offsets), *(weights or [])]
    if dispatched(listed, out) and listed:
        y: torch.Tensor = torch.ops.weft.embedding_all_to_all(
            list(tables),
            list(indices),
            list(offsets),
            mode,
            weights or [],
            group_name(group),
            sparse=sparse,
            schedule=str(schedule),
        )
        return y
    session = session_for(group, tables[0] if anchored is None and tables else None)
    return call(session, schedule, tables, indices, offsets, mode, weights, out)


class _Updated(torch.autograd.Function):
    """A call whose backward pass updates the tables."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        tables: Tables,
        given: Bagged,
        mode: str,
        optimizer: TableOptimizer,
        group: dist.ProcessGroup | None,
        schedule: str,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        session = session_for(group, tables[0] if tables else None)
        ctx.call = tables, given, mode, optimizer, group_name(group)
        return call(session, schedule, tables, *given[:2], mode, given[2], None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        tables, given, mode, optimizer, group = ctx.call
        wanted = ctx.needs_input_grad[7:]
        weights = update(optimizer, dy, tables, given, mode, group, wanted)
        return None, None, None, None, None, None, None, *weights


def _listed(tensors: object) -> list[Any]:
    return list(tensors) if isinstance(tensors, Sequence) else [tensors]


def _anchored(tables: Tables, out: object) -> tuple[Tables, Tables, Tables] | None:
    """An empty table for a rank that has none, so that it takes part in the backward pass."""
    none = isinstance(tables, Sequence) and len(tables) == 0
    if not none or out is not None or not torch.is_grad_enabled():
        return None
    nothing = torch.empty(0, dtype=torch.int64)
    return [torch.empty(0, 0, requires_grad=True)], [nothing], [nothing]
