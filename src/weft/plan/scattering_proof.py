"""Proves that a plan of `plan/scattering.py` or `plan/in_kernel.py` brings every term of every rank
to its owner exactly once."""

from __future__ import annotations

from weft.errors import InvalidPlan
from weft.plan.contents import Contents, Product, covers_once
from weft.plan.scatter_products import Scattering


def check(op: Scattering, contents: Contents) -> None:
    """Raises unless every output holds each term of each rank that belongs there exactly once."""
    for rank in range(op.world):
        found: dict[int, list[tuple[int, int, int, int, int, int]]] = {
            maker: [] for maker in range(op.world)
        }
        for held in contents.of(rank, "y"):
            value = held.value
            if not isinstance(value, Product) or value.b[1] != "w":
                raise InvalidPlan(f"y@{rank} holds {value} where a product belongs")
            maker = value.b[0]
            place, first, rows = _block(op, rank, maker)
            at = held.row - place
            inside = at >= 0 and at + held.rows <= rows
            # An empty sum has no terms, but its zeros must be written exactly once.
            empty = op.inner[maker] == 0
            right = (value.a, value.row) == ((maker, "x"), first + at) or empty
            if not inside or not right or value.column != held.column:
                raise InvalidPlan(f"y@{rank}: rows of rank {maker} are in the wrong place")
            k = (0, 1) if empty else (value.k, value.size)
            found[maker].append((at, held.rows, held.column, held.columns, *k))
        for maker, boxes in found.items():
            size = (_block(op, rank, maker)[2], op.n, max(op.inner[maker], 1))
            covers_once(boxes, size, f"y@{rank} from rank {maker}")


def _block(op: Scattering, rank: int, maker: int) -> tuple[int, int, int]:
    """(row of y, row of the product, rows) of a maker's product in a rank's y."""
    sizes = list(op.sizes(maker))
    if op.everywhere:
        return 0, 0, sum(sizes)
    place = 0 if op.summed else sum(op.sizes(other)[rank] for other in range(maker))
    return place, sum(sizes[:rank]), sizes[rank]
