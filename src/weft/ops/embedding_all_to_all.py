"""`weft.embedding_all_to_all` and `torch.ops.weft.embedding_all_to_all`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from weft.errors import Mismatch, Unsupported
from weft.fabric.device.bags import DeviceBags
from weft.fabric.host.bags import Bags
from weft.fabric.proposal import Proposal
from weft.operation import split
from weft.ops.embedding_gradient import gradients
from weft.ops.operands import (
    DTYPES,
    differentiated,
    dispatched,
    dtype_name,
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
from weft.run.call import check_tensor
from weft.run.session import Session
from weft.schedule import Schedule
from weft.select.decide import AnySchedule

Tables = Sequence[torch.Tensor]
_NAMES = {name: dtype for dtype, name in DTYPES.items()}


def embedding_all_to_all(
    tables: Tables,
    indices: Tables,
    offsets: Tables,
    *,
    mode: str = "sum",
    per_sample_weights: Tables | None = None,
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
        tables: the tables of this rank, [rows, dim] each, contiguous, float32, bfloat16 or float16,
            alike on all ranks; dims may differ, and a rank may have no table.
        indices: for every table the row numbers of all bags, one bag after the other; int32 or
            int64. An index out of range is refused, on every rank.
        offsets: for every table the start of each of the B bags of the whole batch in `indices`, as
            for `torch.nn.EmbeddingBag`; B is the same for all tables and ranks.
        mode: "sum" or "mean"; an empty bag is zero.
        per_sample_weights: for every table the factor of each row; for "sum" only.
        sparse: whether gradients of tables are sparse tensors.
        group: a torch.distributed group; None is all ranks.
        schedule: a name such as "serial@dma", a `Schedule`, or "auto". This is "in-kernel" and,
            between machines, "hetero-unfused-1d:8", which sends slices of the batch when they are
            ready.
        out: the tensor for y; if it is in shared memory (`weft.symmetric_empty`), peers store
            there.

    Returns:
        y [bags of this rank, columns of all tables], in shared memory: of B bags, rank r gets the
        r-th part of `tensor_split`; columns are in the order of ranks and their tables.

    Sums are accumulated in float32. The backward pass is the reverse exchange, so every rank calls
    it; a rank whose tables need no gradient still takes part if it has a loss.
    """
    weights = None if per_sample_weights is None else list(per_sample_weights)
    anchored = _anchored(tables, out)
    if anchored is not None:
        tables, indices, offsets = anchored
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
    bags = _checked(tables, indices, offsets, mode, weights)
    own, dtype = [t.shape[1] for t in tables], _dtype(tables)
    count = max((o.shape[0] for o in offsets), default=0)
    local = ("dims", _runs(own)), ("bags", count if any(own) else -1), ("dtype", dtype)
    # The guess is that peers have as many columns. There is no guess if `out` must fit.
    guess = (count, world * sum(own)) if out is None else (0, 0)
    size = known.get(local, (*guess, dtype or "float32"))
    rows = split(size[0], world)[fabric.rank]
    shape, result = (rows, size[1]), _NAMES[size[2]]
    sure = local in known
    if sure and not learned and _outdated(out, shape, result):
        sure, size, shape = False, (0, 0, dtype or "float32"), (0, 0)
        result = _NAMES[size[2]]
    _check_out(out, shape if sure else None, size[2], [*tables, *(weights or [])])

    def workspaces(schedule: AnySchedule | None) -> Mapping[str, int]:
        if in_kernel(fabric, schedule):
            return {}
        return {"partial": size[0] * sum(own) * result.itemsize}

    def combine(proposals: Sequence[Proposal]) -> EmbeddingAllToAll:
        try:
            return _combine(proposals)
        except Renew as renewed:
            known[local], known.learned = renewed.args[0], True
            raise

    def finish(results: Mapping[str, torch.Tensor]) -> torch.Tensor:
        known[local] = size
        return into(out, results["y"])

    return Bound(
        (("mode", mode),),
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
    found: dict[str, tuple[int, Any]] = {}
    for rank, items in enumerate(own):
        for what in ("bags", "dtype"):
            if items[what] in (-1, ""):
                continue
            first, value = found.setdefault(what, (rank, items[what]))
            if value != items[what]:
                name = "the batch" if what == "bags" else "the dtype of tables"
                raise Mismatch(
                    f"ranks disagree on {name}: it is {value} on rank {first} "
                    f"and {items[what]} on rank {rank}"
                )
    tables = tuple(tuple(d for d, count in o["dims"] for _ in range(count)) for o in own)
    columns = tuple(map(sum, tables))
    bags, dtype = found.get("bags", (0, 0))[1], found.get("dtype", (0, "float32"))[1]
    size = (bags, sum(columns), dtype)
    if any(items["known"] != size for items in own):
        raise Renew(size)
    return EmbeddingAllToAll(split(bags, len(own)), columns, dtype=dtype, tables=tables)


def _runs(sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The sizes as runs (size, count), because headers are small and tables may be many."""
    runs: list[tuple[int, int]] = []
    for size in sizes:
        if runs and runs[-1][0] == size:
            runs[-1] = (size, runs[-1][1] + 1)
        else:
            runs.append((size, 1))
    return tuple(runs)


def _dtype(tables: Tables) -> str:
    """The dtype of the tables that have columns."""
    return next((dtype_name(t.dtype) for t in tables if t.shape[1]), "")


def _checked(
    tables: Tables, indices: Tables, offsets: Tables, mode: str, weights: Tables | None
) -> Bags | DeviceBags:
    """The bags of a call. Raises unless all arguments are valid."""
    if mode not in ("sum", "mean"):
        raise Unsupported(f"mode must be 'sum' or 'mean', not {mode!r}")
    named = {"tables": tables, "indices": indices, "offsets": offsets}
    if weights is not None:
        named["per_sample_weights"] = weights
        if mode != "sum":
            raise Unsupported("per_sample_weights go with mode='sum' only")
    for name, some in named.items():
        if not isinstance(some, Sequence):
            raise Unsupported(f"{name} must be a list with one tensor per table")
        if len(some) != len(tables):
            raise Unsupported(f"there are {len(tables)} tables, but {len(some)} {name}")
        for i, tensor in enumerate(some):
            check_tensor(f"{name}[{i}]", tensor, (2 if name == "tables" else 1,))
    dtype = next((t.dtype for t in tables if t.shape[1]), torch.float32)
    for i, (table, index, offset) in enumerate(zip(tables, indices, offsets, strict=True)):
        if table.shape[1] and table.dtype != dtype:
            raise Unsupported(f"tables[0] is {dtype} and tables[{i}] is {table.dtype}; cast one")
        if table.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise Unsupported(
                f"tables[{i}] is {table.dtype}; use float32, bfloat16 or float16 tables"
            )
        if not table.is_contiguous():
            raise Unsupported(f"tables[{i}] is not contiguous; call .contiguous() on it once")
        for name, tensor in (("indices", index), ("offsets", offset)):
            if tensor.dtype not in (torch.int32, torch.int64):
                raise Unsupported(f"{name}[{i}] is {tensor.dtype}; use int32 or int64")
        if offset.shape[0] != offsets[0].shape[0]:
            raise Unsupported(
                f"offsets[0] has {offsets[0].shape[0]} bags and offsets[{i}] {offset.shape[0]}; "
                "all tables are looked up for the same batch"
            )
        if weights is not None and weights[i].shape != index.shape:
            raise Unsupported(
                f"per_sample_weights[{i}] has {weights[i].shape[0]} numbers for "
                f"{index.shape[0]} indices"
            )
        if weights is not None and weights[i].dtype != table.dtype:
            raise Unsupported(f"per_sample_weights[{i}] must have the dtype of tables[{i}]")
    make = Bags if all(table.is_cpu for table in tables) else DeviceBags
    bags = make(
        tables,
        [i.contiguous() for i in indices],
        [o.contiguous() for o in offsets],
        [None] * len(tables) if weights is None else [w.contiguous() for w in weights],
        mode == "mean",
    )
    bags.check()
    return bags


def _outdated(out: object, shape: tuple[int, int], dtype: torch.dtype) -> bool:
    """Whether out does not fit the result of the last such call. Peers may have other tables now,
    so this rank learns their sizes before it refuses."""
    return isinstance(out, torch.Tensor) and (tuple(out.shape), out.dtype) != (shape, dtype)


def _check_out(out: object, shape: tuple[int, int] | None, dtype: str, inputs: Tables) -> None:
    """Raises unless the result fits into out. shape: of the result, if it is known."""
    if out is None:
        return
    tensor = check_tensor("out", out, (2,))
    if shape is not None and (tuple(tensor.shape) != shape or tensor.dtype != _NAMES[dtype]):
        raise Unsupported(
            f"out is {tuple(tensor.shape)} {tensor.dtype}, but the result is {shape} {dtype}"
        )
    if differentiated([*inputs, tensor]):
        raise Unsupported(
            "out or an input requires grad, and out= has no backward; "
            "leave it out, or call under torch.no_grad()"
        )


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
    return tables[0].new_empty(rows, columns)


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
