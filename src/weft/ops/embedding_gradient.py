"""The gradients of `embedding_all_to_all`: an exchange that brings every rank the gradient of its
bags (`torch.ops.weft.embedding_gradient`), and from that those of tables and weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft import fabric as fabrics
from weft.ops.common import define, dtype_name, resolve_group
from weft.plan.embedding_gradient import EmbeddingGradient
from weft.plan.tasks import Plannable
from weft.run.call import Tensors, carry_out, check_tensor, refuse
from weft.run.proposal import Proposal
from weft.schedule import Schedule

NAME = "embedding_gradient"
Tensorlist = Sequence[torch.Tensor]
Gradients = list[torch.Tensor | None]


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
    """The gradients of tables and of per-sample weights, each where it is wanted."""
    columns = sum(table.shape[1] for table in tables)
    dp = torch.ops.weft.embedding_gradient(dy, columns, group)
    for_tables: Gradients = []
    for_weights: Gradients = []
    column = 0
    for number, (table, index, offset) in enumerate(zip(tables, indices, offsets, strict=True)):
        dim = table.shape[1]
        bags = dp[: offset.shape[0], column : column + dim]
        column += dim
        length = torch.diff(offset.long(), append=offset.new_tensor([index.shape[0]]).long())
        bag = torch.repeat_interleave(torch.arange(offset.shape[0]), length)
        if mode == "mean":
            bags = bags / length.clamp(min=1)[:, None].to(bags.dtype)
        rows = bags[bag]
        if weights is not None:
            wanted = wants_weights[number]
            for_weights.append((rows * table[index.long()]).sum(1) if wanted else None)
            rows = rows * weights[number][:, None]
        wanted = wants_tables[number]
        for_tables.append(_table(table, index.long(), rows, sparse) if wanted else None)
    return for_tables, for_weights


def _table(
    table: torch.Tensor, index: torch.Tensor, rows: torch.Tensor, sparse: bool
) -> torch.Tensor:
    if sparse:
        return torch.sparse_coo_tensor(
            index[None], rows.to(table.dtype), tuple(table.shape), check_invariants=False
        )
    # Many small terms may meet in one row: half precision would lose them.
    total = torch.zeros(table.shape, dtype=torch.float32)
    return total.index_add_(0, index, rows.float()).to(table.dtype)


def _kernel(dy: torch.Tensor, columns: int, group: str) -> torch.Tensor:
    fabric = fabrics.of(resolve_group(group))
    schedule = Schedule.parse("serial")
    try:
        check_tensor("dy", dy, (2,))
        dy = dy.contiguous()
        same = (("columns of dY", dy.shape[1]), ("dtype", dtype_name(dy.dtype)))
        own = (("bags", dy.shape[0]), ("columns", columns))
        proposal = Proposal(NAME, same, own).checked()
    except Exception as error:
        refuse(fabric, NAME, error)
        raise

    def outputs(operation: Plannable, rank: int) -> Tensors:
        assert isinstance(operation, EmbeddingGradient)
        return {"dp": dy.new_empty(sum(operation.batch), columns)}

    why = "columns of the gradient go back to where their tables are"
    inputs = {"dy": dy}
    return carry_out(fabric, proposal, schedule, why, inputs, ("dy",), _combine, outputs)["dp"]


def _combine(proposals: Sequence[Proposal]) -> EmbeddingGradient:
    own = [dict(p.own) for p in proposals]
    same = dict(proposals[0].same)
    bags = tuple(o["bags"] for o in own)
    return EmbeddingGradient(bags, tuple(o["columns"] for o in own), same["dtype"])


def _fake(dy: torch.Tensor, columns: int, group: str) -> torch.Tensor:
    return dy.new_empty(torch.library.get_ctx().new_dynamic_size(), columns)


define(
    "embedding_gradient(Tensor dy, int columns, str group_name) -> Tensor",
    _kernel,
    _fake,
)
