"""Sizes of tensors in graphs: numbers, or expressions of symbols in a graph with dynamic sizes.

Two expressions are equal if they are written alike, so they must be in a normal form. A symbol of
which the graph knows that it can be divided by the number of ranks is written as that number times
another symbol; then s // 2 is a plain product, too. Nothing here adds a guard to the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import sympy
import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true

Size = Any
"""An int, or a sympy expression."""

_facts: WeakKeyDictionary[Graph, dict[sympy.Symbol, sympy.Expr]] = WeakKeyDictionary()


def learn(graph: Graph, worlds: Iterable[int]) -> None:
    """Finds the symbols of a graph that can be divided by one of these numbers of ranks."""
    facts: dict[sympy.Symbol, sympy.Expr] = {}
    for size in _symbolic_sizes(graph):
        symbol = size.node.expr
        if not isinstance(symbol, sympy.Symbol) or symbol in facts:
            continue
        for world in sorted(set(worlds), reverse=True):
            if world > 1 and statically_known_true(size % world == 0):
                share = sympy.Symbol(f"{symbol}_of_{world}", integer=True, positive=True)
                facts[symbol] = world * share
                break
    _facts[graph] = facts


def _symbolic_sizes(graph: Graph) -> Iterable[torch.SymInt]:
    for node in graph.nodes:
        found = node.meta.get("val")
        if isinstance(found, torch.SymInt):
            yield found
        elif isinstance(found, torch.Tensor):
            sizes: list[Any] = list(found.shape)
            yield from (size for size in sizes if isinstance(size, torch.SymInt))


def size_of(size: int | torch.SymInt, graph: Graph | None = None) -> Size:
    """A size in normal form."""
    if isinstance(size, int):
        return size
    expression = size.node.expr.subs(_facts.get(graph, {}) if graph is not None else {})
    return int(expression) if expression.is_Integer else expression


def sizes_of(node: Node) -> list[Size]:
    """The sizes of a node's result in normal form."""
    return [size_of(size, node.graph) for size in node.meta["val"].shape]


def known(node: object) -> bool:
    """Whether a node's result is a tensor whose sizes do not depend on values of tensors."""
    found = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(found, torch.Tensor):
        return False
    return not any(isinstance(s, torch.SymInt) and free_unbacked_symbols(s) for s in found.shape)


def quotient(size: Size, by: Size) -> Size | None:
    """size / by, or None if that is not a whole number for every value of the symbols."""
    if isinstance(size, int) and isinstance(by, int):
        return size // by if by and size % by == 0 else None
    if by == 0 or size == 0:
        return None
    try:
        divided = sympy.cancel(sympy.sympify(size) / by)
    except sympy.PolynomialError:
        return None
    if sympy.fraction(divided)[1] != 1:
        return None
    return int(divided) if divided.is_Integer else divided


def product(sizes: Iterable[Size]) -> Size:
    made: Size = 1
    for size in sizes:
        made = made * size
    return made


class NoSize(Exception):
    """No node of the graph has a size that a rewrite needs."""


def node_of(graph: Graph, wanted: Size) -> int | Node:
    """A number, or a node of the graph with this size. Tensors that the graph makes are not asked
    for it, because the rewrite may replace them."""
    if isinstance(wanted, int):
        return wanted
    for node in graph.nodes:
        found = node.meta.get("val")
        if isinstance(found, torch.SymInt) and size_of(found, graph) == wanted:
            same: Node = node
            return same
    for node in graph.find_nodes(op="placeholder"):
        if known(node) and wanted in sizes_of(node):
            place = sizes_of(node).index(wanted)
            made = graph.call_function(torch.ops.aten.sym_size.int, (node, place))
            made.meta["val"] = node.meta["val"].shape[place]
            return made
    factors = sympy.Mul.make_args(wanted)
    if len(factors) == 1:
        raise NoSize(str(wanted))
    return _multiplied(graph, [int(f) if f.is_Integer else f for f in factors])


def _multiplied(graph: Graph, factors: list[Size]) -> int | Node:
    first, *rest = (node_of(graph, factor) for factor in factors)
    for other in rest:
        node = graph.call_function(operator.mul, (first, other))
        values = [n.meta["val"] if isinstance(n, Node) else n for n in (first, other)]
        node.meta["val"] = values[0] * values[1]
        first = node
    return first


def shape_nodes(graph: Graph, shape: Iterable[Size]) -> list[int | Node]:
    """A shape as arguments of a node. One size that is not a number is left for torch to infer."""
    listed = list(shape)
    symbolic = [i for i, size in enumerate(listed) if not isinstance(size, int)]
    products = [i for i in symbolic if not isinstance(listed[i], sympy.Symbol)] or symbolic
    inferred = products[0] if products else -1
    return [-1 if i == inferred else node_of(graph, size) for i, size in enumerate(listed)]
