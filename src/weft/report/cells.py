"""The text of table cells, and the alignment of columns, for the terminal and for pages."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from weft.errors import printable
from weft.report.units import SLOWER

Cell = str | int | float | None

_NUMBER = re.compile(r"[-+]?[\d.,]+(e[-+]?\d+)?\s*([%x]|[a-zA-Zµ/]{1,7})?")
_EMPTY = ("", "-", SLOWER)
"""Texts that say nothing about whether a column holds numbers."""


def columns_of(headers: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[list[str]]:
    """The text of every column. The floats of a column have the same number of decimals."""
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(f"a row has {len(row)} cells under {len(headers)} headers: {row!r}")
    return [_column([row[i] for row in rows]) for i in range(len(headers))]


def is_numeric(column: Sequence[str]) -> bool:
    """Whether a column holds numbers, possibly with a unit, and is aligned right."""
    filled = [text for text in column if text not in _EMPTY]
    return bool(filled) and all(_NUMBER.fullmatch(text) for text in filled)


def _column(cells: Sequence[Cell]) -> list[str]:
    floats = [abs(c) for c in cells if isinstance(c, float) and math.isfinite(c)]
    largest = max(floats, default=0.0)
    decimals = 0 if largest >= 1000 else 1 if largest >= 100 else 2 if largest >= 1 else 3
    return [_text(cell, decimals) for cell in cells]


def _text(cell: Cell, decimals: int) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}"
    if isinstance(cell, float):
        return f"{cell:z,.{decimals}f}" if math.isfinite(cell) else "-"
    return printable(cell, kept="\n")
