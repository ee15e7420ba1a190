"""Follows a tensor of a graph through operations that only move elements, and tracks its layout."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from weft.nn.graph_sizes import known, size_of, sizes_of
from weft.nn.layout import Layout

aten = torch.ops.aten

REGROUPING = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.contiguous.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
}
"""Operations whose result has the elements of their input in the same order."""

PERMUTING = {aten.permute.default, aten.transpose.int, aten.t.default}
CHUNKING = {aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default}
CASTING = {aten._to_copy.default, torch.ops.prims.convert_element_type.default}
PRODUCTS = {aten.mm.default, aten.addmm.default}


def value(node: Node) -> Any:
    """The fake tensor (or other value) of a node's result."""
    return node.meta.get("val")


def follow(starts: dict[Node, Layout]) -> dict[Node, Layout]:
    """The layouts of all nodes that hold exactly the elements of the starts, possibly moved. The
    sum of tensors with equal layouts has that layout, too."""
    layouts = dict(starts)
    waiting = [user for start in starts for user in start.users]
    while waiting:
        node = waiting.pop()
        if node.target in CHUNKING or (node.target is operator.getitem and _is_chunk(node)):
            waiting.extend(node.users)
        elif node not in layouts:
            layout = _moved(node, layouts)
            if layout is not None:
                layouts[node] = layout
                waiting.extend(node.users)
    return layouts


def moves(node: Node) -> list[Node]:
    """The tensors whose elements an operation moves or adds; empty if it does anything else."""
    if node.target in REGROUPING | PERMUTING | CASTING:
        return [node.all_input_nodes[0]]
    if node.target is aten.add.Tensor and len(node.all_input_nodes) == 2 and not node.kwargs:
        return node.all_input_nodes
    if node.target is aten.cat.default:
        source = _chunked(node)
        return [] if source is None else [source[0]]
    return []


def _moved(node: Node, layouts: dict[Node, Layout]) -> Layout | None:
    sources = moves(node)
    if not sources or not known(node) or any(source not in layouts for source in sources):
        return None
    layout, shape = layouts[sources[0]], sizes_of(node)
    if node.target in REGROUPING:
        return layout.regrouped(shape)
    if node.target in CASTING:
        return layout
    if node.target is aten.add.Tensor:
        return layout if layouts[sources[1]] == layout else None
    if node.target is aten.cat.default:
        chunked = _chunked(node)
        assert chunked is not None
        _, dim, count = chunked
        target = node.args[1] if len(node.args) > 1 else 0
        return layout.rechunked(dim, count, int(target) % len(shape))  # type: ignore[arg-type]
    order = list(range(len(shape)))
    if node.target is aten.permute.default:
        order = [int(i) % len(shape) for i in node.args[1]]  # type: ignore[union-attr, arg-type]
    else:
        a, b = (node.args[1], node.args[2]) if node.target is aten.transpose.int else (0, -1)
        a, b = int(a) % len(shape), int(b) % len(shape)  # type: ignore[arg-type]
        order[a], order[b] = order[b], order[a]
    return layout.permuted(order)


def _is_chunk(node: Node) -> bool:
    source = node.args[0]
    return isinstance(source, Node) and source.target in CHUNKING


def _chunked(node: Node) -> tuple[Node, int, int] | None:
    """The tensor whose equal chunks a `cat` concatenates, all of them and in order, the dimension
    along which it was cut, and the number of chunks."""
    parts = node.args[0]
    if not isinstance(parts, (list, tuple)) or not parts:
        return None
    found: set[tuple[Node, int]] = set()
    for index, part in enumerate(parts):
        if not isinstance(part, Node) or part.target is not operator.getitem:
            return None
        chunks, number = part.args
        if number != index or not isinstance(chunks, Node) or chunks.target not in CHUNKING:
            return None
        source = chunks.args[0]
        if not isinstance(source, Node) or not known(source):
            return None
        graph = node.graph
        sizes = {tuple(size_of(s, graph) for s in piece.shape) for piece in value(chunks)}
        if len(value(chunks)) != len(parts) or len(sizes) != 1:
            return None
        dim = chunks.args[2] if len(chunks.args) > 2 else chunks.kwargs.get("dim", 0)
        found.add((source, int(dim) % value(source).dim()))  # type: ignore[arg-type]
    if len(found) != 1:
        return None
    source, dim = found.pop()
    return source, dim, len(parts)
