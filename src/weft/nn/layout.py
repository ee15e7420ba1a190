"""Layouts: where elements are after views, transposes and chunks. Every dimension is a list of
named parts.

A gathered tensor [world * a, b, K] has the layout [[ranks, a], [b], [K]]. Views regroup the parts
in order, permutations reorder the dimensions, and cutting one dimension into chunks that are
concatenated along another moves parts between dimensions. Two tensors with the same layout are
equal, whatever operations made them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.nn.graph_sizes import Size, product, quotient


@dataclass(frozen=True)
class DimensionPart:
    """Part of the original dimension `name`. `path` describes how it was cut, from the outside in:
    each step is (index of the part, number of parts)."""

    name: str
    size: Size
    path: tuple[Size, ...] = ()


Dims = tuple[tuple[DimensionPart, ...], ...]


@dataclass(frozen=True)
class Layout:
    """The parts of every dimension, outermost first, without parts of size 1."""

    dims: Dims

    @classmethod
    def of(cls, *dims: Sequence[tuple[str, Size]]) -> Layout:
        return cls(tuple(tuple(DimensionPart(n, s) for n, s in dim if s != 1) for dim in dims))

    @property
    def flat(self) -> tuple[DimensionPart, ...]:
        return tuple(part for dim in self.dims for part in dim)

    def regrouped(self, shape: Sequence[Size]) -> Layout | None:
        """The layout of a view, or None if the shape does not fit the parts (a part would not be
        cut evenly)."""
        waiting = list(self.flat)
        dims = []
        for size in shape:
            dim = _take(waiting, size)
            if dim is None:
                return None
            dims.append(dim)
        return None if waiting else Layout(tuple(join(dim) for dim in dims))

    def permuted(self, order: Sequence[int]) -> Layout:
        return Layout(tuple(self.dims[i] for i in order))

    def rechunked(self, source: int, count: int, target: int) -> Layout | None:
        """The layout after the dimension `source` is cut into `count` chunks, and these are
        concatenated along `target`."""
        leading = self.leading(source, count)
        if leading is None:
            return None
        chunks, rest = leading
        dims = list(self.dims)
        dims[source] = rest
        dims[target] = (*chunks, *dims[target])
        return Layout(tuple(join(dim) for dim in dims))

    def leading(
        self, dim: int, count: Size
    ) -> tuple[tuple[DimensionPart, ...], tuple[DimensionPart, ...]] | None:
        """The first parts of a dimension, of `count` elements in total, and the other parts."""
        waiting = list(self.dims[dim])
        taken = _take(waiting, count)
        return None if taken is None else (taken, tuple(waiting))

    def size(self, dim: int) -> Size:
        return product(part.size for part in self.dims[dim])


def _take(waiting: list[DimensionPart], count: Size) -> tuple[DimensionPart, ...] | None:
    """Takes the first parts, of `count` elements in total; the last of them may be cut."""
    taken: list[DimensionPart] = []
    missing = count
    while missing != 1:
        if not waiting or missing == 0:
            return None
        part = waiting.pop(0)
        left = quotient(missing, part.size)
        if left is None:
            pieces = _cut(part, missing)
            if pieces is None:
                return None
            part, rest = pieces
            waiting.insert(0, rest)
            left = 1
        missing = left
        taken.append(part)
    return tuple(taken)


def _cut(part: DimensionPart, outer: Size) -> tuple[DimensionPart, DimensionPart] | None:
    """Cuts a part into an outer and an inner part."""
    inner = quotient(part.size, outer)
    if inner is None:
        return None
    return DimensionPart(part.name, outer, (*part.path, 0, inner)), DimensionPart(
        part.name, inner, (*part.path, 1, outer)
    )


def join(parts: Sequence[DimensionPart]) -> tuple[DimensionPart, ...]:
    """Joins adjacent parts that were cut from the same part."""
    result: list[DimensionPart] = []
    for part in parts:
        while result and (whole := _whole(result[-1], part)) is not None:
            result.pop()
            part = whole
        result.append(part)
    return tuple(result)


def _whole(left: DimensionPart, right: DimensionPart) -> DimensionPart | None:
    if left.name != right.name or not left.path or not right.path:
        return None
    same = left.path[:-2] == right.path[:-2]
    if same and left.path[-2:] == (0, right.size) and right.path[-2:] == (1, left.size):
        return DimensionPart(left.name, left.size * right.size, left.path[:-2])
    return None
