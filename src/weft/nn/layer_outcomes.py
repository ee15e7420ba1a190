"""What becomes of a layer under each style of a plan: the rows of the report."""

from __future__ import annotations

from typing import Any

from weft.nn.model_report import LayerReport
from weft.nn.plans import wildcard

_AFTERWARDS = "its columns are gathered after the product, which weft does not overlap"
_LOOKUP = "a lookup has no product that could hide its {}"
_EXPERTS = "the results of the experts are summed when all of them are done"
_SINGLE = "only its gradient is summed, behind the backward of other layers"
_OTHERS = "a style of yours; see its own description"

_OUTCOMES = {
    "colwise": ("local", "matmul_all_reduce", ""),
    "packed_colwise": ("local", "matmul_all_reduce", ""),
    "colwise_gather_output": ("all_gather", "matmul_all_reduce", _AFTERWARDS),
    "colwise_rep": ("all_gather", "matmul_all_reduce", _AFTERWARDS),
    "rowwise": ("matmul_all_reduce", "local", ""),
    "rowwise_split_input": ("matmul_all_reduce", "all_gather", "its input is gathered backward"),
    "rowwise_rep": ("matmul_all_reduce", "all_gather", "its input is gathered backward"),
    "embedding_rowwise": ("all_reduce", "local", _LOOKUP.format("sum")),
    "embedding_colwise": ("all_gather", "local", _LOOKUP.format("gather")),
    "moe_tp_experts": ("all_reduce", "all_reduce", _EXPERTS),
    "expert_parallel": ("all_reduce", "all_reduce", _EXPERTS),
    "replicated_with_grad_allreduce": ("local", "all_reduce", _SINGLE),
    "mla_kv_a_proj": ("local", "all_reduce", _SINGLE),
    "all_reduce": ("all_reduce", "local", "there is no product of weft before the sum"),
    "moe_identity_expert": ("local", "local", ""),
}
"""By style: what runs forward and backward, and why communication is not overlapped."""


def outcome(names: tuple[str, ...], style: Any, sequence: bool, gathers: bool) -> LayerReport:
    """The row of a layer, or of several with one input. sequence: whether activations around it are
    divided along the sequence. gathers: whether the block around it gathers them first."""
    shown = wildcard(names[0])
    if len(names) > 1:
        shown = f"{shown.rpartition('.')[0]}.{_in_braces([n.split('.')[-1] for n in names])}"
    if not isinstance(style, str):
        return LayerReport(shown, 1, type(style).__name__, "its own", "its own", _OTHERS)
    kind = style.partition(":")[0]
    forward, backward, why = _OUTCOMES[kind]
    if sequence and not gathers and kind in ("colwise", "packed_colwise"):
        forward, backward = "all_gather_matmul", "matmul_reduce_scatter"
    elif sequence and not gathers and kind == "rowwise":
        forward, backward = "matmul_reduce_scatter", "all_gather_matmul"
    elif sequence and gathers and not why:
        why = "the block around it gathers the sequence first, because not all of it is sharded"
    return LayerReport(shown, 1, style, forward, backward, why)


def _in_braces(names: list[str]) -> str:
    """Several names as one: {q,k,v}_proj."""
    tail = "_proj" if all(name.endswith("_proj") for name in names) else ""
    return f"{{{','.join(name.removesuffix(tail) for name in names)}}}{tail}"
