"""Proves that a plan of `plan/gathering.py` gathers the right rows and multiplies each exactly
once."""

from __future__ import annotations

from weft.errors import InvalidPlan
from weft.operation import starts
from weft.plan.contents import Contents, Held, Product, covers_once
from weft.plan.gathering import Gathering


def check(op: Gathering, contents: Contents) -> None:
    """Raises unless every output holds what the operation defines, each term exactly once."""
    for rank in range(op.world):
        places = _Places(op, rank)
        for index, n in enumerate(op.columns[rank]):
            _check_product(op, places, contents, index, n)
        if op.gathered:
            _check_gathered(op, places, contents)


class _Places:
    """The places of a rank's gathered rows."""

    def __init__(self, op: Gathering, rank: int) -> None:
        self.rank = rank
        self.spans = op.spans(rank)
        self.offsets = starts([rows for _, rows in self.spans])
        self.m = sum(rows for _, rows in self.spans)

    def holds(self, held: Held, source: int, row: int) -> bool:
        """Whether a held rectangle is at the place for the source's x rows from `row` on."""
        first, rows = self.spans[source]
        at = row - first
        inside = at >= 0 and at + held.rows <= rows
        return inside and held.row == self.offsets[source] + at


def _check_product(op: Gathering, places: _Places, contents: Contents, index: int, n: int) -> None:
    boxes, rank = [], places.rank
    for held in contents.of(rank, f"y{index}"):
        value = held.value
        if op.k == 0 and isinstance(value, Product):
            # An empty sum has no terms, but its zeros must be written exactly once.
            boxes.append((held.row, held.rows, held.column, held.columns, 0, 1))
            continue
        if not isinstance(value, Product) or value.b != (rank, f"w{index}") or value.a[1] != "x":
            raise InvalidPlan(f"y{index}@{rank} holds {held.value} where a product belongs")
        source = value.a[0]
        if not places.holds(held, source, value.row) or held.column != value.column:
            raise InvalidPlan(f"y{index}@{rank}: the rows of x{source} are in the wrong place")
        boxes.append((held.row, held.rows, held.column, held.columns, value.k, value.size))
    covers_once(boxes, (places.m, n, max(op.k, 1)), f"y{index}@{rank}")


def _check_gathered(op: Gathering, places: _Places, contents: Contents) -> None:
    boxes, rank = [], places.rank
    for held in contents.of(rank, "gathered"):
        value = held.value
        if isinstance(value, Product) or value.buffer[1] != "x":
            raise InvalidPlan(f"gathered@{rank} holds {value} where input rows belong")
        source = value.buffer[0]
        if not places.holds(held, source, value.row) or held.column != value.column:
            raise InvalidPlan(f"gathered@{rank}: a chunk of x{source} is in the wrong place")
        boxes.append((held.row, held.rows, held.column, held.columns, 0, 1))
    covers_once(boxes, (places.m, op.k, 1), f"gathered@{rank}")
