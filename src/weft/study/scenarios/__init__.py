"""The shapes of a study: a given one, those of a file, or those that come with weft."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.dtype import MULTIPLIED
from weft.dtype import find as find_dtype
from weft.errors import Unsupported, nearest
from weft.files import read_text
from weft.plan.tasks import Plannable

_FOLDER = Path(__file__).parent
_SIZES = ("m", "n", "k")
_KNOWN = ("id", *_SIZES, "dtype", "result", "note")
_MOST = 1 << 48
"""The largest size. Beyond it, bytes and flops would not be exact numbers."""


@dataclass(frozen=True)
class Shape:
    """An unsharded GEMM over all ranks: C[m, n] = A[m, k] B[k, n]. dtype: of A and B. result: of C,
    if it is another."""

    m: int
    n: int
    k: int
    id: str = ""
    dtype: str = "bfloat16"
    note: str = ""
    result: str | None = None

    def __post_init__(self) -> None:
        for name in _SIZES:
            size = getattr(self, name)
            if size < 1:
                raise Unsupported(f"{name} must be at least 1, not {size}")
            if size > _MOST:
                raise Unsupported(f"{name} must be at most {_MOST}")
        if self.dtype not in MULTIPLIED:
            raise Unsupported(f"there is no dtype {self.dtype!r}{nearest(self.dtype, MULTIPLIED)}")
        if self.result is not None:
            find_dtype(self.result)

    @property
    def label(self) -> str:
        """The id, or the sizes if there is no id."""
        return self.id or f"{self.m}x{self.n}x{self.k}"

    def operation(self, kind: type[Any], columns: int, world: int) -> Plannable:
        """The operation of this shape with that many columns of B on every rank."""
        made: Plannable
        if self.result is None:
            made = kind.of(self.m, columns, self.k, world, self.dtype)
        elif "result" in kind.__dataclass_fields__:
            made = kind.of(self.m, columns, self.k, world, self.dtype, result=self.result)
        else:
            raise Unsupported(f"{kind.name} gives the dtype that it takes; leave out the result's")
        return made


def ficco() -> tuple[Shape, ...]:
    """The 16 GEMMs of the FiCCO evaluation. Their file names the source.

    Sizes are unsharded, so each rank has N / world columns of B. g14 to g16 are expert-parallel.
    They are explored as an all-gather like the others (same flops per rank, more bytes).
    """
    return from_csv(_FOLDER / "ficco.csv")


def from_csv(path: str | Path) -> tuple[Shape, ...]:
    """The shapes of a file with the columns m, n, k, and optionally id, dtype, result and note.

    Empty lines and lines that start with # are skipped.
    """
    path = Path(path)
    lines = read_text(path).splitlines()
    kept = [(n, line) for n, line in enumerate(lines, 1) if line.strip() and line[0] != "#"]
    if not kept:
        raise Unsupported(f"{path.name} is empty; its first line must name the columns m, n and k")
    header = [name.strip() for name in _fields(kept[0][1], f"{path.name} line {kept[0][0]}")]
    _check_header(header, path.name, kept[0][0])
    shapes: list[Shape] = []
    seen: dict[str, int] = {}
    for number, line in kept[1:]:
        where = f"{path.name} line {number}"
        shape = _shape(header, _fields(line, where), where)
        if shape.label in seen:
            raise Unsupported(f"{where}: {shape.label} is on line {seen[shape.label]} already")
        seen[shape.label] = number
        shapes.append(shape)
    if not shapes:
        raise Unsupported(f"{path.name} has no shapes below its header")
    return tuple(shapes)


def _fields(line: str, where: str) -> list[str]:
    try:
        return next(csv.reader([line]))
    except csv.Error as error:
        raise Unsupported(f"{where} is no line of a CSV file: {error}") from None


def _check_header(header: list[str], name: str, number: int) -> None:
    for column in header:
        if column not in _KNOWN:
            raise Unsupported(
                f"{name} line {number}: unknown column {column!r}{nearest(column, _KNOWN)}"
            )
    for column in _SIZES:
        if column not in header:
            raise Unsupported(f"{name} line {number}: there is no column {column}")
    if len(set(header)) < len(header):
        raise Unsupported(f"{name} line {number}: a column is there twice")


def _shape(header: Iterable[str], values: list[str], where: str) -> Shape:
    header = list(header)
    if len(values) != len(header):
        raise Unsupported(f"{where}: there are {len(values)} values for {len(header)} columns")
    row = {column: value.strip() for column, value in zip(header, values, strict=True)}
    sizes = {}
    for column in _SIZES:
        try:
            sizes[column] = int(row[column])
        except ValueError as error:
            raise Unsupported(
                f"{where}: {column} must be a whole number, not {row[column]!r}"
            ) from error
    texts = {key: row[key] for key in ("id", "dtype", "result", "note") if row.get(key)}
    try:
        return Shape(**sizes, **texts)  # type: ignore[arg-type]
    except Unsupported as error:
        raise Unsupported(f"{where}: {error}") from error
