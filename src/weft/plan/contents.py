"""Traces what every buffer holds after a plan has run, without running it.

The contents of a buffer are a list of rectangles (`Held`). A rectangle holds either part of an
input, moved there by copies and permutes, or a product: rows of one input times columns of another,
over a range of k. A sum holds the rectangles of all its sources, which then overlap. Accumulating
adds overlapping rectangles; writing replaces what was there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from weft.errors import InvalidPlan
from weft.plan.tasks import AnyTask, KernelTiles, Matmul, Plan, Reduce, Region

Key = tuple[int, str]


# Tuples, because a plan makes many of them, and the first call of a new size waits for its proof.


class Data(NamedTuple):
    """Part of an input, from (row, column) on."""

    buffer: Key
    row: int
    column: int

    def moved(self, rows: int, columns: int) -> Data:
        return Data(self.buffer, self.row + rows, self.column + columns)


class Product(NamedTuple):
    """Rows of a from `row` on times columns of b from `column` on, over `size` terms from `k` on.

    If a is transposed, these are the columns of a from `row` on and its rows from `k` on, which are
    multiplied with the rows of b from `k + shift` on.
    """

    a: Key
    b: Key
    row: int
    column: int
    k: int
    size: int
    shift: int = 0

    def moved(self, rows: int, columns: int) -> Product:
        a, b, row, column, k, size, shift = self
        return Product(a, b, row + rows, column + columns, k, size, shift)


class Held(NamedTuple):
    """A rectangle of a buffer and what it holds."""

    row: int
    rows: int
    column: int
    columns: int
    value: Data | Product

    def cut(self, row: int, rows: int, column: int, columns: int) -> Held | None:
        """The part inside the given rectangle, or None."""
        own_row, own_rows, own_column, own_columns, value = self
        down, right = row - own_row, column - own_column
        within = down <= 0 and right <= 0 and own_rows > 0 and own_columns > 0
        if within and own_rows - down <= rows and own_columns - right <= columns:
            return self
        down, right = max(down, 0), max(right, 0)
        height = min(own_rows, row + rows - own_row) - down
        width = min(own_columns, column + columns - own_column) - right
        if height <= 0 or width <= 0:
            return None
        return Held(own_row + down, height, own_column + right, width, value.moved(down, right))

    def without(self, r: Region) -> list[Held]:
        """The parts outside the region, as up to four rectangles."""
        bottom, right = r.row + r.rows, r.column + r.columns
        if (
            self.row >= bottom
            or self.column >= right
            or self.row + self.rows <= r.row
            or self.column + self.columns <= r.column
        ):
            return [self]
        middle = max(self.row, r.row)
        height = min(self.row + self.rows, bottom) - middle
        around = [
            (self.row, r.row - self.row, self.column, self.columns),
            (bottom, self.row + self.rows - bottom, self.column, self.columns),
            (middle, height, self.column, r.column - self.column),
            (middle, height, right, self.column + self.columns - right),
        ]
        return [part for box in around if (part := self.cut(*box)) is not None]


class _Rows:
    """The held rectangles of one buffer, sorted by row so that a region finds its own quickly."""

    def __init__(self) -> None:
        self.holdings: list[Held] = []
        self._starts: list[int] = []
        self._tallest = 0

    def near(self, region: Region) -> slice:
        low = bisect_left(self._starts, region.row - self._tallest + 1)
        return slice(low, max(low, bisect_left(self._starts, region.row + region.rows)))

    def replace(self, where: slice, holdings: list[Held]) -> None:
        if len(holdings) > 1:
            holdings.sort(key=itemgetter(0))  # by row
        self.holdings[where] = holdings
        self._starts[where] = [held[0] for held in holdings]
        for held in holdings:
            if held[1] > self._tallest:
                self._tallest = held[1]


class Contents:
    """The held rectangles of every buffer during a trace."""

    def __init__(self, plan: Plan) -> None:
        self._rows: dict[Key, _Rows] = {(b.rank, b.name): _Rows() for b in plan.buffers}
        for buffer in plan.buffers:
            if buffer.kind in ("input", "inplace") and buffer.rows * buffer.columns > 0:
                key = (buffer.rank, buffer.name)
                whole = Held(0, buffer.rows, 0, buffer.columns, Data(key, 0, 0))
                self._rows[key].replace(slice(0, 0), [whole])

    def of(self, rank: int, buffer: str) -> list[Held]:
        return self._rows[(rank, buffer)].holdings

    def read(self, region: Region) -> list[Held]:
        rank, buffer, *box = region
        rows, found = self._rows[rank, buffer], []
        near = rows.holdings
        if len(near) > 1:
            near = near[rows.near(region)]
        for held in near:
            part = held.cut(*box)
            if part is not None:
                found.append(part)
        return found

    def read_inputs(self, region: Region, task: AnyTask) -> list[Held]:
        """The held rectangles of a region; raises `InvalidPlan` unless they fill it."""
        holdings = self.read(region)
        missing = region.num_elements
        for held in holdings:
            missing -= held.rows * held.columns
        if missing > 0:
            raise InvalidPlan(
                f"missing chunk: {task.label!r} of rank {task.rank} reads {region}, "
                f"but nothing has written {missing} elements of it"
            )
        return holdings

    def write(self, region: Region, holdings: Sequence[Held], accumulate: bool = False) -> None:
        rows = self._rows[region.key]
        where = rows.near(region)
        kept = rows.holdings[where]
        if not accumulate:
            kept = [part for held in kept for part in held.without(region)]
        rows.replace(where, [*kept, *holdings])


def trace(plan: Plan, order: list[int]) -> Contents:
    """The contents of all buffers after the tasks have run in the given order."""
    contents = Contents(plan)
    for task in (plan.tasks[index] for index in order):
        if isinstance(task, Matmul):
            _multiply(contents, task)
            continue
        if isinstance(task, Reduce):
            _add(contents, task)
            continue
        if isinstance(task, KernelTiles):
            for part in task.parts:
                _multiply(
                    contents, Matmul(task.id, task.rank, (), task.label, part.a, part.b, part.c)
                )
            continue
        pairs = list(zip(task.reads(), task.writes(), strict=True))
        moved = [(target, _moved(contents, task, source, target)) for source, target in pairs]
        for target, holdings in moved:
            contents.write(target, holdings)
    return contents


def _moved(contents: Contents, task: AnyTask, source: Region, target: Region) -> list[Held]:
    down, right = target.row - source.row, target.column - source.column
    return _shifted(contents.read_inputs(source, task), down, right)


def _shifted(holdings: list[Held], down: int, right: int) -> list[Held]:
    if down == right == 0:
        return holdings
    return [
        Held(row + down, rows, column + right, columns, value)
        for row, rows, column, columns, value in holdings
    ]


def _add(contents: Contents, task: Reduce) -> None:
    first = task.targets[0]
    total = [held for source in task.sources for held in _moved(contents, task, source, first)]
    for target in task.targets:
        down, right = target.row - first.row, target.column - first.column
        contents.write(target, _shifted(total, down, right))


def _multiply(contents: Contents, task: Matmul) -> None:
    c = task.c
    if task.accumulate:
        contents.read_inputs(c, task)
    products: list[Held] = []
    if task.inner == 0:
        row = task.a.column if task.transposed else task.a.row
        value = Product(task.a.key, task.b.key, row, task.b.column, 0, 0)
        products.append(Held(c.row, c.rows, c.column, c.columns, value))
    else:
        for a in contents.read_inputs(task.a, task):
            for b in contents.read_inputs(task.b, task):
                product = _term(task, a, b)
                if product is not None:
                    products.append(product)
    contents.write(c, products, task.accumulate)


def _term(task: Matmul, a: Held, b: Held) -> Held | None:
    """The product of a rectangle of a with one of b, which must have the same range of k."""
    if isinstance(a.value, Product) or isinstance(b.value, Product):
        raise InvalidPlan(f"{task.label!r} of rank {task.rank} multiplies a result, not an input")
    if task.transposed:
        return _transposed_term(task, a, b)
    same_k = a.column - task.a.column == b.row - task.b.row and a.columns == b.rows
    if not same_k or a.value.column != b.value.row:
        raise InvalidPlan(
            f"{task.label!r} of rank {task.rank} multiplies columns {a.value.column} on of its "
            f"left input with rows {b.value.row} on of its right input"
        )
    value = Product(
        a.value.buffer, b.value.buffer, a.value.row, b.value.column, a.value.column, a.columns
    )
    row = task.c.row + a.row - task.a.row
    column = task.c.column + b.column - task.b.column
    return Held(row, a.rows, column, b.columns, value)


def _transposed_term(task: Matmul, a: Held, b: Held) -> Held | None:
    """The same for a transposed a; None if the two rectangles have no rows in common."""
    assert isinstance(a.value, Data)
    assert isinstance(b.value, Data)
    first_a, first_b = a.row - task.a.row, b.row - task.b.row
    first = max(first_a, first_b)
    size = min(first_a + a.rows, first_b + b.rows) - first
    if size <= 0:
        return None
    k, other = a.value.row + first - first_a, b.value.row + first - first_b
    value = Product(
        a.value.buffer, b.value.buffer, a.value.column, b.value.column, k, size, other - k
    )
    row = task.c.row + a.column - task.a.column
    column = task.c.column + b.column - task.b.column
    return Held(row, a.columns, column, b.columns, value)


def covers_once(
    boxes: Sequence[tuple[int, int, int, int, int, int]], size: tuple[int, int, int], what: str
) -> None:
    """Raises unless the boxes, (start, length) in three directions, fill `size` exactly once."""
    if 0 in size or (len(boxes) == 1 and boxes[0] == (0, size[0], 0, size[1], 0, size[2])):
        return
    starts = [
        sorted({0, size[d], *(b[2 * d] for b in boxes), *(b[2 * d] + b[2 * d + 1] for b in boxes)})
        for d in range(3)
    ]
    index = [{value: i for i, value in enumerate(values)} for values in starts]
    count = np.zeros([len(values) - 1 for values in starts], dtype=np.int32)
    for box in boxes:
        ends = [
            slice(index[d][box[2 * d]], index[d][box[2 * d] + box[2 * d + 1]]) for d in range(3)
        ]
        count[ends[0], ends[1], ends[2]] += 1
    if (count == 1).all():
        return
    at = np.argwhere(count != 1)[0]
    row, column, k = (starts[d][int(at[d])] for d in range(3))
    times = int(count[tuple(at)])
    kind = "missing chunk" if times == 0 else "double write"
    raise InvalidPlan(f"{kind}: element [{row}, {column}] of {what} gets term {k} {times} times")
