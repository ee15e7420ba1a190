"""Graph patterns with the collective before the products: all_gather + mm, all_to_all + mm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from weft.nn.following import PRODUCTS, aten, follow, moves, value
from weft.nn.graph_sizes import Size, known, quotient, sizes_of
from weft.nn.layout import DimensionPart, Layout
from weft.nn.report import Match, NearMiss, Report
from weft.nn.rewrite import call, cast, depends, group_of, item, prune, shaped

collectives = torch.ops._c10d_functional
ALL_GATHER = collectives.all_gather_into_tensor.default
COLLECTIVES = {ALL_GATHER, collectives.all_to_all_single.default}


@dataclass
class _Product:
    """A product with the gathered tensor x: x @ other, or, if `turned`, other @ x^T."""

    node: Node
    other: Node
    turned: bool
    dim: int
    dtype: torch.dtype


def replace(graph: Graph, node: Node, schedule: str, report: Report) -> str | None:
    """Replaces a collective and the products of its result, or returns why it cannot."""
    gathers = node.target is ALL_GATHER
    shard, group_argument = node.args[0], node.args[2 if gathers else 3]
    waits = [user for user in node.users if user.target is collectives.wait_tensor.default]
    if len(waits) != 1 or len(node.users) != 1 or not isinstance(shard, Node):
        return "its result is not waited for exactly once"
    if not known(shard) or not known(waits[0]):
        return "its sizes depend on values of tensors"
    if not gathers and not _constant(node.args[1], node.args[2]):
        return "its splits are not constants of the graph"
    wait, shape = waits[0], sizes_of(shard)
    if len(shape) < 2 or len(shape) > 4:
        return f"it moves a tensor of {len(shape)} dimensions; weft multiplies those of 2 to 4"
    ranks = node.args[1] if gathers else 1
    assert isinstance(ranks, int)
    named = [[(f"d{i}", size)] for i, size in enumerate(shape)]
    named[0] = [("ranks", ranks), ("d0", shape[0])] if gathers else [("d0", sizes_of(wait)[0])]
    layouts = follow({wait: Layout.of(*named)})
    products, others, reasons = _products(layouts, shape, ranks, gathers)
    maker = None if products or reasons else _maker(shard)
    if maker is not None:
        return (
            f"it gathers the result of {maker.name}; weft overlaps a gather with products after it"
        )
    if not products:
        uses = ", ".join(sorted(user.name for user in others))
        return reasons[0] if reasons else f"no product uses its result (used by {uses or 'none'})"
    dim, dtype = products[0].dim, products[0].dtype
    alike = [p for p in products if p.dim == dim and p.dtype == dtype][: None if gathers else 1]
    for product in products:
        if product not in alike:
            report.near_misses.append(
                NearMiss(product.node.name, f"{alike[0].node.name} uses {node.name} in another way")
            )
            others.add(product.node)
    if others and dtype != value(wait).dtype:
        return f"its result is used as {value(wait).dtype} and as {dtype}"
    group, problem = group_of(group_argument)
    if problem is not None:
        return problem

    with graph.inserting_before(alike[0].node):
        x = cast(graph, shard, dtype)
        weights = [call(graph, aten.t.default, p.other) if p.turned else p.other for p in alike]
        if gathers:
            fused = call(
                graph,
                torch.ops.weft.all_gather_matmul.default,
                x,
                weights,
                dim,
                group,
                return_A=bool(others),
                schedule=schedule,
            )
            results = [item(graph, item(graph, fused, 1), i) for i in range(len(alike))]
        else:
            fused = call(
                graph,
                torch.ops.weft.all_to_all_matmul.default,
                x,
                weights[0],
                node.args[2],
                node.args[1],
                group,
                return_A=bool(others),
                schedule=schedule,
            )
            results = [item(graph, fused, 1)]
        made = [_turned(graph, p, result) for p, result in zip(alike, results, strict=True)]
        for product, result in zip(alike, made, strict=True):
            product.node.replace_all_uses_with(result)
        if others:
            _put_gathered(graph, wait, layouts, item(graph, fused, 0), dim, ranks)
    detail = f"gather_dim={dim}" if gathers else "dispatch"
    if others:
        kept = ", ".join(sorted(user.name for user in others))
        detail += f", with return_A: also used by {kept}"
    name = "all_gather_matmul" if gathers else "all_to_all_matmul"
    report.matches.append(Match(name, (node.name, *(p.node.name for p in alike)), detail))
    prune(graph, *(product.node for product in alike), *layouts)
    return None


def _maker(node: Node) -> Node | None:
    """The product whose elements a node holds, if it is one."""
    while node.target not in PRODUCTS:
        before = moves(node)
        if len(before) != 1:
            return None
        node = before[0]
    return node


def _constant(*lists: object) -> bool:
    return all(isinstance(s, (list, tuple)) and all(isinstance(n, int) for n in s) for s in lists)


def _products(
    layouts: dict[Node, Layout], shape: list[Size], ranks: int, gathers: bool
) -> tuple[list[_Product], set[Node], list[str]]:
    """The products that can be fused with the collective, all other users of its result, and the
    reasons why products among those users cannot be fused."""
    products: list[_Product] = []
    others: set[Node] = set()
    reasons: list[str] = []
    sums = Layout.of([(f"d{len(shape) - 1}", shape[-1])]).dims[0]
    for node, layout in layouts.items():
        for user in node.users:
            if user in layouts or _leads_on(user, layouts):
                continue
            others.add(user)
            if user.target not in PRODUCTS or not known(user):
                continue
            left, right = user.args[-2:]
            if left is right or (user.target is aten.addmm.default and user.kwargs):
                reasons.append(f"{user.name} is not a plain product with one other matrix")
                continue
            turned = right is node
            rows, columns = reversed(layout.dims) if turned else layout.dims
            other = left if turned else right
            if columns != sums:
                reasons.append(
                    f"{user.name} sums over the dimension that is gathered, not over the last one"
                )
                continue
            dim = _gather_dim(rows, shape, ranks) if gathers else _in_order(rows, shape)
            if dim is None:
                reasons.append(f"{user.name} has its rows in another order than a gather gives")
                continue
            assert isinstance(other, Node)
            made = {wait for wait in layouts if wait is not node} | {p.node for p in products}
            if depends(other, made | {node}):
                reasons.append(f"the other matrix of {user.name} is made from what is gathered")
                continue
            products.append(_Product(user, other, turned, dim, value(node).dtype))
            others.discard(user)
    return products, others, reasons


def _leads_on(user: Node, layouts: dict[Node, Layout]) -> bool:
    """Whether a user (a chunk) only leads to a node that is followed."""
    return any(
        after in layouts or _leads_on(after, layouts)
        for after in user.users
        if not isinstance(value(user), torch.Tensor) or after.target is aten.cat.default
    )


def _gather_dim(rows: tuple[DimensionPart, ...], shape: list[Size], ranks: int) -> int | None:
    """The dimension along which the shards are concatenated in these rows."""
    for dim in range(len(shape) - 1):
        named = [(f"d{i}", size) for i, size in enumerate(shape[:-1])]
        named.insert(dim, ("ranks", ranks))
        if Layout.of(named).dims[0] == rows:
            return dim
    return None


def _in_order(rows: tuple[DimensionPart, ...], shape: list[Size]) -> int | None:
    names = [part.name for part in rows]
    return 0 if names == sorted(names) and not any(part.path for part in rows) else None


def _turned(graph: Graph, product: _Product, result: Node) -> Node:
    """The result of the new operator in the form of the product that it replaces."""
    wanted = sizes_of(product.node)
    y = shaped(graph, result, wanted[::-1] if product.turned else wanted)
    if product.turned:
        y = call(graph, aten.t.default, y)
    if product.node.target is aten.addmm.default:
        y = call(graph, aten.add.Tensor, y, product.node.args[0])
    return y


def _put_gathered(
    graph: Graph, wait: Node, layouts: dict[Node, Layout], gathered: Node, dim: int, ranks: int
) -> None:
    """Replaces the result of the collective by the gathered tensor of the new operator."""
    shape = sizes_of(gathered)
    if dim > 0:
        one = quotient(shape[dim], ranks)
        same = Layout.of(
            *(
                [("ranks", ranks), (f"d{i}", one)] if i == dim else [(f"d{i}", size)]
                for i, size in enumerate(shape)
            )
        )
        for node, layout in layouts.items():
            if layout == same and sizes_of(node) == shape:
                node.replace_all_uses_with(gathered)
        parts = shaped(graph, gathered, [*shape[:dim], ranks, one, *shape[dim + 1 :]])
        order = [dim, *(i for i in range(len(shape) + 1) if i != dim)]
        gathered = call(graph, aten.permute.default, parts, order)
        gathered = shaped(graph, gathered, sizes_of(wait))
    wait.replace_all_uses_with(gathered)
