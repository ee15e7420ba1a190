"""Collectives that no product of a graph hides: they run as weft's own instead of torch's.

Small collectives of weft take a fraction of the time of gloo's. In a graph they are the operators
`torch.ops.weft.all_reduce`, `all_gather`, ... with the arguments of torch's functional collectives.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from weft import fabric as fabrics
from weft.collectives.exchanges import all_to_all
from weft.collectives.gathers import all_gather, broadcast
from weft.collectives.group_channel import check_reduction
from weft.collectives.kinds import reduction
from weft.collectives.sums import all_reduce, reduce_scatter
from weft.errors import Unsupported
from weft.nn.following import PERMUTING, REGROUPING, value
from weft.nn.report import NearMiss, Report
from weft.nn.rewrite import call, group_of, prune
from weft.ops.operands import resolve_group
from weft.ops.operator import library

functional = torch.ops._c10d_functional
WAIT = functional.wait_tensor.default

_BY_TORCH = {
    functional.all_reduce.default: "all_reduce",
    functional.all_gather_into_tensor.default: "all_gather",
    functional.reduce_scatter_tensor.default: "reduce_scatter",
    functional.all_to_all_single.default: "all_to_all",
    functional.broadcast.default: "broadcast",
    functional.all_reduce_coalesced.default: "all_reduce",
    functional.all_gather_into_tensor_coalesced.default: "all_gather",
    functional.reduce_scatter_tensor_coalesced.default: "reduce_scatter",
}
_SUMS = ("all_reduce", "reduce_scatter")
_FREE = {*REGROUPING, *PERMUTING, operator.getitem, torch.ops.aten.sym_size.int, WAIT, *_BY_TORCH}
"""What takes no time between the start of a collective and the wait for it."""


def swap(graph: Graph, report: Report) -> None:
    """Replaces every collective that is left in a graph by weft's own, and reports each."""
    for node in list(graph.nodes):
        if node.target not in _BY_TORCH:
            continue
        name = _BY_TORCH[node.target]
        kept = _swap(graph, node, name)
        found = [miss for miss in report.near_misses if miss.node == node.name]
        if not found:
            found = [NearMiss(node.name, "no operator of weft has a product beside it")]
        others = [miss for miss in report.near_misses if miss not in found]
        outcome = {"operator": name} if kept is None else {"kept": kept}
        report.near_misses = [*others, *(replace(miss, **outcome) for miss in found)]


def _swap(graph: Graph, node: Node, name: str) -> str | None:
    """Replaces one collective; returns the reason if it stays torch's."""
    given = node.args[0]
    tensors = [given] if isinstance(given, Node) else list(given)  # type: ignore[arg-type]
    group, problem = group_of(node.args[-1])
    if problem is not None:
        return problem
    if not fabrics.of(resolve_group(group)).can.collectives:
        return "its ranks have no shared memory"
    for tensor in tensors:
        made = value(tensor)
        if not isinstance(made, torch.Tensor) or made.device.type != "cpu":
            return "its tensors are not on the CPU"
        try:
            if name in _SUMS:
                check_reduction(made.dtype, reduction(str(node.args[1])))
        except Unsupported as error:
            return f"weft cannot reduce them: {error}"
    if _hides(node):
        return "it runs in the background of what stands before its wait"
    target = getattr(torch.ops.weft, name).default
    with graph.inserting_before(node):
        results = [call(graph, target, x, *node.args[1:-1], group) for x in tensors]
    if isinstance(given, Node):
        _put(node, results[0])
    else:
        for user in list(node.users):
            _put(user, results[int(user.args[1])])  # type: ignore[arg-type]
            prune(graph, user)
    prune(graph, node)
    return None


def _hides(node: Node) -> bool:
    """Whether anything is computed between the start of a collective and the wait for it."""
    waits = {user for user in node.users if user.target is WAIT}
    for first in node.users:
        if first.target is operator.getitem:
            waits |= {user for user in first.users if user.target is WAIT}
    after = node.next
    while waits and after.op != "root":
        waits.discard(after)
        if waits and after.op == "call_function" and after.target not in _FREE:
            return isinstance(value(after), torch.Tensor)
        after = after.next
    return False


def _put(node: Node, result: Node) -> None:
    """Replaces a collective's result, and what waits for it, by a result that needs no wait."""
    for user in list(node.users):
        if user.target is WAIT:
            user.replace_all_uses_with(result)
            user.graph.erase_node(user)
    node.replace_all_uses_with(result)


# -- the operators ---------------------------------------------------------------------------------


def _all_reduce(x: torch.Tensor, op: str, group_name: str) -> torch.Tensor:
    x = x.contiguous()
    return all_reduce(x, op, out=torch.empty_like(x), group=resolve_group(group_name))


def _all_gather(x: torch.Tensor, world: int, group_name: str) -> torch.Tensor:
    out = _like_gathered(x, world, group_name)
    return all_gather(x.contiguous(), out=out, group=resolve_group(group_name))


def _reduce_scatter(x: torch.Tensor, op: str, world: int, group_name: str) -> torch.Tensor:
    out = _like_scattered(x, op, world, group_name)
    return reduce_scatter(x.contiguous(), op, out=out, group=resolve_group(group_name))


def _all_to_all(
    x: torch.Tensor, out_splits: Sequence[int], in_splits: Sequence[int], group_name: str
) -> torch.Tensor:
    return all_to_all(x, in_splits, out_splits, group=resolve_group(group_name))


def _broadcast(x: torch.Tensor, root: int, group_name: str) -> torch.Tensor:
    x = x.contiguous()
    made = broadcast(x, root, out=torch.empty_like(x), group=resolve_group(group_name))
    assert isinstance(made, torch.Tensor)
    return made


def _like(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


def _like_gathered(x: torch.Tensor, world: int, group_name: str) -> torch.Tensor:
    return x.new_empty(world * x.shape[0], *x.shape[1:])


def _like_scattered(x: torch.Tensor, op: str, world: int, group_name: str) -> torch.Tensor:
    return x.new_empty(x.shape[0] // world, *x.shape[1:])


def _like_exchanged(
    x: torch.Tensor, out_splits: Sequence[int], in_splits: Sequence[int], group_name: str
) -> torch.Tensor:
    return x.new_empty(sum(out_splits), *x.shape[1:])


_OPERATORS: dict[str, tuple[Any, Any]] = {
    "all_reduce(Tensor x, str op, str group_name) -> Tensor": (_all_reduce, _like),
    "all_gather(Tensor x, int world, str group_name) -> Tensor": (_all_gather, _like_gathered),
    "reduce_scatter(Tensor x, str op, int world, str group_name) -> Tensor": (
        _reduce_scatter,
        _like_scattered,
    ),
    "all_to_all(Tensor x, SymInt[] out_splits, SymInt[] in_splits, str group_name) -> Tensor": (
        _all_to_all,
        _like_exchanged,
    ),
    "broadcast(Tensor x, int root, str group_name) -> Tensor": (_broadcast, _like),
}

for _schema, (_kernel, _fake) in _OPERATORS.items():
    _name = _schema.partition("(")[0]
    library.define(_schema)  # type: ignore[no-untyped-call]
    library.impl(_name, _kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"weft::{_name}", _fake, lib=library)
