"""The operator `torch.ops.weft.embedding_all_to_all`, which `weft.embedding_all_to_all` calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from weft.errors import Mismatch
from weft.fabric.device.device_bags import DeviceBags
from weft.fabric.host.bags import Bags, bags_of, viewed
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
from weft.ops.embedding_gradient import gradients
from weft.ops.known import Operands, key_of
from weft.ops.operands import resolve_group
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

    def again(
        tables: Tables,
        indices: Tables,
        offsets: Tables,
        mode: str,
        weights: Tables | None,
        out: torch.Tensor | None,
    ) -> Operands:
        bags: Bags | DeviceBags | None = None
        if fabric.device.type == "cpu" and (out is None or weights is None):
            bags = viewed(tables, indices, offsets, weights, modes, result)
        if bags is None:  # indices are not just as kernels take them, and a known call is checked
            checked_modes(tables, indices, offsets, mode, weights)
            check_result(out, shape if sure else None, size[2], [*tables, *(weights or [])])
            bags = _bags_of(tables, indices, offsets, weights, modes, result)
        bags.check()

        def finish(results: Mapping[str, torch.Tensor]) -> torch.Tensor:
            known[local] = size
            return into(out, results["y"])

        inputs = {"bags": cast(torch.Tensor, bags)}  # only lookups read it
        return Operands(inputs, finish, None, Output(shape, result, out if sure else None))

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

    return Bound(
        (("mode", "one for each table" if mode.endswith(",") else mode),),
        (*local, ("known", size)),
        (),
        lambda: EmbeddingAllToAll(split(count, world), (sum(own),) * world),
        workspaces=workspaces,
        combine=combine,
        again=again,
    )


def _bags_of(
    tables: Tables,
    indices: Tables,
    offsets: Tables,
    weights: Tables | None,
    modes: Sequence[str],
    out: torch.dtype,
) -> Bags | DeviceBags:
    if all(table.is_cpu for table in tables):
        return bags_of(tables, indices, offsets, weights, modes, out)
    given = [None] * len(tables) if weights is None else [w.contiguous() for w in weights]
    indices, offsets = [i.contiguous() for i in indices], [o.contiguous() for o in offsets]
    return DeviceBags(tables, indices, offsets, given, modes, out)


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
    return call(session, schedule, tables, indices, offsets, mode, given, None)


def call(
    session: Session,
    schedule: str | Schedule,
    tables: Tables,
    indices: Tables,
    offsets: Tables,
    mode: str,
    weights: Tables | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """One call of the operator. How it is made does not depend on the number of indices, which
    nearly every call has another of."""
    name = OPERATOR.name
    key = key_of(name, schedule, (tables, offsets, mode, weights is None, out))
    y: torch.Tensor = run(
        OPERATOR, session, schedule, tables, indices, offsets, mode, weights, out, key=key
    )
    return y


def _fake(
    tables: Tables,
    indices: Tables,
    offsets: Tables,
    mode: str,
    weights: Tables,
    group: str,
    **_: Any,
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
