"""Helpers for graph rewrites: new nodes with their fake values, groups, and the order of nodes."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from weft import fabric as fabrics
from weft.errors import Error
from weft.nn.following import aten, value
from weft.nn.graph_sizes import Size, known, product, shape_nodes, size_of, sizes_of
from weft.ops.operands import resolve_group


def call(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Inserts a new node, with its fake value, at the graph's current insertion point."""
    node = graph.call_function(target, args, kwargs)
    refresh(node)
    return node


def refresh(node: Node) -> None:
    """Recomputes the fake value of a node."""
    args, kwargs = map_arg((node.args, node.kwargs), value)
    node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def item(graph: Graph, node: Node, index: int) -> Node:
    return call(graph, operator.getitem, node, index)


def shaped(graph: Graph, node: Node, shape: Sequence[Size]) -> Node:
    """Reshapes a node; its elements keep their order."""
    if sizes_of(node) == list(shape):
        return node
    return call(graph, aten.reshape.default, node, shape_nodes(graph, shape))


def drop_copies(graph: Graph) -> None:
    """Removes the copies of in-place collectives: `dist.all_reduce(y)` is traced as a functional
    collective whose result is copied over y, of which nothing is left then."""
    for node in list(graph.nodes):
        if node.target is not aten.copy.default:
            continue
        onto, source = node.args[:2]
        if not (known(onto) and known(source)):
            continue
        before, after = value(onto), value(source)
        same = before.dtype == after.dtype and before.device == after.device
        if same and sizes_of(onto) == sizes_of(source) and _strides(onto) == _strides(source):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _strides(node: Any) -> list[Size]:
    return [size_of(stride, node.graph) for stride in value(node).stride()]


def cast(graph: Graph, node: Node, dtype: torch.dtype) -> Node:
    if value(node).dtype == dtype:
        return node
    return call(graph, aten._to_copy.default, node, dtype=dtype)


def joined(graph: Graph, nodes: Sequence[Node], dim: int) -> Node:
    return nodes[0] if len(nodes) == 1 else call(graph, aten.cat.default, list(nodes), dim)


def split_products(graph: Graph) -> None:
    """Rewrites linear layers, and products of more than two dimensions, as 2-D products. Graphs
    traced before autograd still contain them."""
    for node in list(graph.nodes):
        if node.target not in (aten.linear.default, aten.matmul.default) or not known(node):
            continue
        x, other = node.args[:2]
        if not (known(x) and known(other)) or value(x).dim() < 2 or value(other).dim() != 2:
            continue
        linear = node.target is aten.linear.default
        bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
        shape = sizes_of(node)
        with graph.inserting_before(node):
            rows = shaped(graph, x, [product(shape[:-1]), sizes_of(x)[-1]])
            other = call(graph, aten.t.default, other) if linear else other
            if bias is None:
                y = call(graph, aten.mm.default, rows, other)
            else:
                y = call(graph, aten.addmm.default, bias, rows, other)
            node.replace_all_uses_with(shaped(graph, y, shape))
        graph.erase_node(node)


def depends(node: Node, on: set[Node]) -> bool:
    """Whether a node depends on any of the others."""
    seen: set[Node] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current in on:
            return True
        if current not in seen:
            seen.add(current)
            waiting.extend(current.all_input_nodes)
    return False


def group_of(argument: object) -> tuple[str, str | None]:
    """The name of a collective's group, and the reason if weft cannot use it."""
    if isinstance(argument, dist.ProcessGroup):
        argument = argument.group_name
    if not isinstance(argument, str):
        return "", "its group is not a constant of the graph"
    try:
        fabrics.of(resolve_group(argument))
    except Error as error:
        return argument, f"its group cannot be used: {error}"
    return argument, None


def prune(graph: Graph, *nodes: Node) -> None:
    """Removes nodes that nothing uses any more, and the inputs that only they used."""
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node.users or node.op != "call_function" or node.graph is not graph or node._erased:
            continue
        waiting.extend(node.all_input_nodes)
        graph.erase_node(node)


def sort(graph: Graph) -> None:
    """Moves every node behind its inputs, and keeps the order otherwise."""
    order: list[Node] = []
    placed: set[Node] = set()
    for first in list(graph.nodes):
        waiting = [first]
        while waiting:
            node = waiting[-1]
            missing = [n for n in node.all_input_nodes if n not in placed]
            if missing:
                waiting.extend(missing)
                continue
            waiting.pop()
            if node not in placed:
                placed.add(node)
                order.append(node)
    for before, after in itertools.pairwise(order):
        before.append(after)
