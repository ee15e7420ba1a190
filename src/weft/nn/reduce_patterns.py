"""Graph patterns with products before the collective: mm + reduce_scatter, all_reduce or
all_to_all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from weft.nn.following import aten, follow, moves, value
from weft.nn.graph_sizes import Size, known, product, quotient, sizes_of
from weft.nn.layout import DimensionPart, Layout, join
from weft.nn.report import Match, Report
from weft.nn.rewrite import call, cast, group_of, joined, prune, shaped

collectives = torch.ops._c10d_functional
REDUCE_SCATTER = collectives.reduce_scatter_tensor.default
ALL_REDUCE = collectives.all_reduce.default
ALL_TO_ALL = collectives.all_to_all_single.default
COLLECTIVES = {REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL}


@dataclass
class _Sum:
    """The products whose sum is the collective's input, and the layout of that input."""

    products: list[Node]
    layout: Layout
    steps: set[Node]


def replace(graph: Graph, node: Node, schedule: str, report: Report) -> str | None:
    """Replaces a collective and the products of its input, or returns why it cannot."""
    waits = [user for user in node.users if user.target is collectives.wait_tensor.default]
    source = node.args[0]
    if len(waits) != 1 or len(node.users) != 1 or not isinstance(source, Node):
        return "its result is not waited for exactly once"
    if not known(source):
        return "its sizes depend on values of tensors"
    found = _sum(source, node)
    if isinstance(found, str):
        return found
    dtype = value(found.products[0]).dtype
    if dtype.itemsize < value(source).dtype.itemsize:
        return f"its input is widened from {dtype}, and weft would round the sum to that"
    group, problem = group_of(node.args[-1])
    if problem is not None:
        return problem
    with graph.inserting_before(node):
        a = joined(graph, [p.args[0] for p in found.products], -1)  # type: ignore[misc]
        b = joined(graph, [p.args[1] for p in found.products], 0)  # type: ignore[misc]
        if node.target is REDUCE_SCATTER:
            made: Any = _reduce_scatter(graph, node, found, a, b, group, schedule)
        elif node.target is ALL_REDUCE:
            made = _all_reduce(graph, node, found, a, b, group, schedule)
        else:
            made = _all_to_all(graph, node, found, a, b, group, schedule)
        if isinstance(made, str):
            prune(graph, a, b)
            return made
        name, result = made
        result = shaped(graph, result, sizes_of(waits[0]))
        result = cast(graph, result, value(source).dtype)
    waits[0].replace_all_uses_with(result)
    names = (*(p.name for p in found.products), node.name)
    prune(graph, waits[0])
    report.matches.append(Match(name, names))
    return None


def _sum(source: Node, collective: Node) -> _Sum | str:
    """The products whose sum is `source`, through moves and additions only, or a reason if none."""
    products: list[Node] = []
    steps: set[Node] = set()
    waiting = [source]
    while waiting:
        node = waiting.pop()
        if node.target is aten.mm.default and known(node):
            products.append(node)
            continue
        if node.target is aten.addmm.default:
            return f"{node.name} adds a bias, which the sum would count once for every rank"
        before = moves(node)
        if not before:
            return f"its input is made by {node.name}, not by products alone"
        steps.add(node)
        waiting += before
    products.reverse()
    layouts = follow(
        {p: Layout.of([("m", p_m)], [("n", p_n)]) for p in products for p_m, p_n in [sizes_of(p)]}
    )
    if source not in layouts:
        return "its products are put together in a way that weft does not follow"
    outside = {
        user.name
        for node in {*products, *steps}
        for user in node.users
        if user is not collective
        and user not in steps
        and isinstance(value(user), torch.Tensor)
        and not any(after in steps for after in user.users)
    }
    if outside:
        return f"the product before it is also used by {', '.join(sorted(outside))}"
    return _Sum(products, layouts[source], steps)


def _reduce_scatter(
    graph: Graph, node: Node, found: _Sum, a: Node, b: Node, group: str, schedule: str
) -> tuple[str, Node] | str:
    world, n = node.args[2], sizes_of(b)[1]
    assert isinstance(world, int)
    leading = found.layout.leading(0, world)
    if leading is None or found.layout.dims[-1] != _whole("n", n):
        return "it scatters the columns of the product; weft scatters rows"
    ranks, first = leading
    rest = [*first, *(part for dim in found.layout.dims[1:-1] for part in dim)]
    m, k = sizes_of(a)
    for place in range(len(rest) + 1):
        if join((*rest[:place], *ranks, *rest[place:])) == _whole("m", m):
            before = product(part.size for part in rest[:place])
            break
    else:
        return "it scatters the rows of the product in another order than along one dimension"
    x = a if before == 1 else shaped(graph, a, [before, quotient(m, before), k])
    target = torch.ops.weft.matmul_reduce_scatter.default
    dim = 0 if before == 1 else 1
    y = call(graph, target, x, b, node.args[1], dim, group, schedule=schedule)
    return "matmul_reduce_scatter", y


def _all_reduce(
    graph: Graph, node: Node, found: _Sum, a: Node, b: Node, group: str, schedule: str
) -> tuple[str, Node] | str:
    m, n = sizes_of(a)[0], sizes_of(b)[1]
    flat = join(found.layout.flat)
    target = torch.ops.weft.matmul_all_reduce.default
    if flat == _whole("m", m) + _whole("n", n):
        return "matmul_all_reduce", call(
            graph, target, a, b, *node.args[1:2], group, schedule=schedule
        )
    if flat == _whole("n", n) + _whole("m", m):
        y = call(graph, target, a, b, *node.args[1:2], group, schedule=schedule)
        return "matmul_all_reduce", call(graph, aten.t.default, y)
    return "the elements of the product are in another order by then"


def _all_to_all(
    graph: Graph, node: Node, found: _Sum, a: Node, b: Node, group: str, schedule: str
) -> tuple[str, Node] | str:
    out_splits, in_splits = node.args[1], node.args[2]
    constant = all(
        isinstance(s, (list, tuple)) and all(isinstance(n, int) for n in s)
        for s in (out_splits, in_splits)
    )
    if not constant:
        return "its splits are not constants of the graph"
    m, n = sizes_of(a)[0], sizes_of(b)[1]
    rows = tuple(part for dim in found.layout.dims[:-1] for part in dim)
    if join(rows) != _whole("m", m) or found.layout.dims[-1] != _whole("n", n):
        return "the elements of the product are in another order by then"
    shape = sizes_of(node.args[0])  # type: ignore[arg-type]
    if not 2 <= len(shape) <= 4:
        return f"it moves a tensor of {len(shape)} dimensions; weft multiplies those of 2 to 4"
    x = shaped(graph, a, [*shape[:-1], sizes_of(a)[1]])
    target = torch.ops.weft.matmul_all_to_all.default
    y = call(graph, target, x, b, in_splits, out_splits, group, schedule=schedule)
    return "matmul_all_to_all", y


def _whole(name: str, size: Size) -> tuple[DimensionPart, ...]:
    return Layout.of([(name, size)]).dims[0]
