"""`weft.embedding_all_to_all` and `torch.ops.weft.embedding_all_to_all`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from weft.errors import Mismatch, Unsupported
from weft.fabric.device.bags import DeviceBags
from weft.fabric.host.bags import Bags
from weft.fabric.proposal import Proposal
from weft.operation import split
from weft.ops.embedding_checks import (
    LAST_OFFSET,
    NAMES,
    Tables,
    check_result,
    checked_modes,
    dtype_of,
    outdated,
    promoted,
    runs_of,
)
from weft.ops.embedding_gradient import gradients, update
from weft.ops.embedding_inputs import Bagged, Shards, bagged, mode_text, modes_of
from weft.ops.embedding_optimizer import TableOptimizer
from weft.ops.operands import (
    dispatched,
    group_name,
    resolve_group,
)
from weft.ops.operator import (
    Bound,
    Operator,
    Output,
    Renew,
    in_kernel,
    into,
    register,
    run,
    session_for,
)
from weft.plan.embedding_all_to_all import EmbeddingAllToAll
from weft.run.session import Session
from weft.schedule import Schedule
from weft.select.decide import AnySchedule


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
    count = len(tables) if isinstance(tables, Sequence) else 1
    first = tables[0] if isinstance(tables, Sequence) and count else None
    shards = None
    try:
        given = bagged(count, indices, offsets, lengths, per_sample_weights, include_last_offset)
        if row_splits is not None:
            fabric = session_for(group, first).fabric
            modes = modes_of(mode, count)
            shards = Shards(tables, given, row_splits, modes, fabric.rank, fabric.world)
            if out is not None:
                raise Unsupported("out= cannot be used with row_splits; use the returned tensor")
            given, mode = shards.given, shards.pooling
    except Exception as error:
        session_for(group, first).fabric.refuse(OPERATOR.name, error)
        raise
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
    y: torch.Tensor
    if dispatched(listed, out) and listed:
        y = torch.ops.weft.embedding_all_to_all(
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
    y = run(OPERATOR, session, schedule, tables, indices, offsets, mode, weights, out)
    return y


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
        y: torch.Tensor = run(OPERATOR, session, schedule, tables, *given[:2], mode, given[2], None)
        return y

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


class _Sizes(dict[Any, tuple[int, int, str]]):
    """(bags, columns, dtype) over all ranks in the last call with such tables.

    Headers carry the address of a rank's result, so its size must be known before the ranks meet. A
    rank assumes that of the last such call. If this is wrong on any rank, all ranks see it in the
    same headers, and call again. learned: whether a call has just learned the sizes from its
    peers, and is about to be repeated.
    """

    learned = False


def _bind(
    session: Session,
    tables: Tables,
    indices: Tables,
    offsets: Tables,
    mode: str,
    weights: Tables | None,
    out: torch.Tensor | None,
) -> Bound:
    fabric = session.fabric
    world, known = fabric.world, session.part(_Sizes, lambda _: _Sizes())
    learned, known.learned = known.learned, False
    modes = checked_modes(tables, indices, offsets, mode, weights)
    own, dtype = [t.shape[1] for t in tables], dtype_of(tables)
    count = max((o.shape[0] for o in offsets), default=0)
    local = ("dims", runs_of(own)), ("bags", count if any(own) else -1), ("dtype", dtype)
    # The guess is that peers have as many columns. There is no guess if `out` must fit.
    guess = (count, world * sum(own)) if out is None else (0, 0)
    size = known.get(local, (*guess, dtype or "float32"))
    rows = split(size[0], world)[fabric.rank]
    shape, result = (rows, size[1]), NAMES[size[2]]
    sure = local in known
    if sure and not learned and outdated(out, shape, result):
        sure, size, shape = False, (0, 0, dtype or "float32"), (0, 0)
        result = NAMES[size[2]]
    check_result(out, shape if sure else None, size[2], [*tables, *(weights or [])])
    make = Bags if all(table.is_cpu for table in tables) else DeviceBags
    bags = make(
        tables,
        [i.contiguous() for i in indices],
        [o.contiguous() for o in offsets],
        [None] * len(tables) if weights is None else [w.contiguous() for w in weights],
        modes,
        result,
    )
    bags.check()

    def workspaces(schedule: AnySchedule | None) -> Mapping[str, int]:
        if in_kernel(fabric, schedule):
            return {}
        return {"partial": size[0] * sum(own) * result.itemsize}

    def combine(proposals: Sequence[Proposal]) -> EmbeddingAllToAll:
        try:
            return _combine(proposals)
        except Renew as renewed:
            known[local], known.learned = renewed.size, True
            raise

    def finish(results: Mapping[str, torch.Tensor]) -> torch.Tensor:
        known[local] = size
        return into(out, results["y"])

    return Bound(
        (("mode", "one for each table" if mode.endswith(",") else mode),),
        (*local, ("known", size)),
        (),
        lambda: EmbeddingAllToAll(split(count, world), (sum(own),) * world),
        {"bags": cast(torch.Tensor, bags)},  # only lookups read it
        finish,
        stored=Output(shape, result, out if sure else None),
        workspaces=workspaces,
        combine=combine,
    )


def _combine(proposals: Sequence[Proposal]) -> EmbeddingAllToAll:
    """The operation that the proposals of all ranks make together."""
    own = [dict(p.own) for p in proposals]
    first, bags = next(((r, o["bags"]) for r, o in enumerate(own) if o["bags"] >= 0), (0, 0))
    for rank, items in enumerate(own):
        if items["bags"] not in (-1, bags):
            one_more = abs(items["bags"] - bags) == 1
            raise Mismatch(
                f"ranks disagree on the batch: it is {bags} on rank {first} "
                f"and {items['bags']} on rank {rank}{LAST_OFFSET if one_more else ''}"
            )
    tables = tuple(tuple(d for d, count in o["dims"] for _ in range(count)) for o in own)
    columns = tuple(map(sum, tables))
    dtype = promoted([o["dtype"] for o in own if o["dtype"]]) or "float32"
    size = (bags, sum(columns), dtype)
    if any(items["known"] != size for items in own):
        raise Renew(size)
    return EmbeddingAllToAll(split(bags, len(own)), columns, dtype=dtype, tables=tables)


def _kernel(
    tables: Tables,
    indices: Tables,
    offsets: Tables,
    mode: str,
    weights: Tables,
    group: str,
    *,
    sparse: bool = False,
    schedule: str = "auto",
) -> torch.Tensor:
    session, given = session_for(resolve_group(group), tables[0]), weights or None
    y: torch.Tensor = run(OPERATOR, session, schedule, tables, indices, offsets, mode, given, None)
    return y


def _fake(
    tables: Tables,
    indices: Tables,
    offsets: Tables,
    mode: str,
    weights: Tables,
    group: str,
    *,
    sparse: bool = False,
    schedule: str = "auto",
) -> torch.Tensor:
    # The number of columns of peers is not known before the call.
    ranks = resolve_group(group)
    rows = split(offsets[0].shape[0], dist.get_world_size(ranks))[dist.get_rank(ranks)]
    columns = torch.library.get_ctx().new_dynamic_size()
    return tables[0].new_empty(rows, columns, dtype=NAMES[dtype_of(tables) or "float32"])


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Any
) -> None:
    tables, indices, offsets, ctx.mode, weights, ctx.group = inputs
    ctx.counts = len(tables), len(weights)
    ctx.sparse = keyword_only_inputs["sparse"]
    ctx.save_for_backward(*tables, *indices, *offsets, *weights)


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    count, weighted = ctx.counts
    saved = ctx.saved_tensors
    tables, indices, offsets = (saved[i * count : (i + 1) * count] for i in range(3))
    weights = saved[3 * count :] if weighted else None
    needed = ctx.needs_input_grad
    wants_tables = needed[0] if isinstance(needed[0], Sequence) else [needed[0]] * count
    wants_weights = needed[4] if isinstance(needed[4], Sequence) else [needed[4]] * weighted
    for_tables, for_weights = gradients(
        dy, tables, indices, offsets, weights, ctx.mode, ctx.sparse, ctx.group,
        wants_tables, wants_weights,
    )  # fmt: skip
    nothing = [None] * count
    return for_tables, nothing, nothing, None, for_weights, None


OPERATOR = register(
    Operator(
        name="embedding_all_to_all",
        operation=EmbeddingAllToAll,
        bind=_bind,
        combine=_combine,
        schema="embedding_all_to_all(Tensor[] tables, Tensor[] indices, Tensor[] offsets, "
        "str mode, Tensor[] per_sample_weights, str group_name, *, bool sparse=False, "
        'str schedule="auto") -> Tensor',
        kernel=_kernel,
        fake=_fake,
        setup_context=_setup_context,
        backward=_backward,
    )
)
