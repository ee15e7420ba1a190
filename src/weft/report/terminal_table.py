"""Tables for the terminal that hold at any width: columns go by priority, and no word is broken."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from weft.errors import printable
from weft.report import cells

_BEST = "bold green"
_GAP = 2
"""Columns between two columns of a table."""


def table(
    headers: Sequence[str],
    rows: Sequence[Sequence[cells.Cell]],
    *,
    title: str | None = None,
    caption: str | None = None,
    best: int | None = None,
    ties: Collection[int] = (),
    width: int = 100,
    whole: Collection[int] = (),
    drop: Sequence[int] = (),
) -> RenderableType:
    """A table of at most `width` columns. Numbers are aligned right, row `best` is bold.

    ties: rows that are equally good, marked alike. whole: columns of text that must not be broken
    into lines; words never are. drop: columns to leave out, the least important first, until the
    others fit, then those from the right; the caption names them.
    """
    columns = cells.columns_of(headers, rows)
    if best is not None or ties:
        marks = [
            "> " if number == best else "= " if number in ties else "  "
            for number in range(len(rows))
        ]
        columns[0] = [mark + text for mark, text in zip(marks, columns[0], strict=True)]
    made = [
        _column(header, column, cells.is_numeric(column), place in whole or not place)
        for place, (header, column) in enumerate(zip(headers, columns, strict=True))
    ]
    return _Fitted(tuple(made), len(rows), title, caption, best, width, tuple(drop))


@dataclass(frozen=True)
class _Column:
    """A column: its texts, how wide it is at best, and the width below which a word would break."""

    header: str
    texts: tuple[str, ...]
    numeric: bool
    natural: int
    least: int


def _column(header: str, texts: Sequence[str], numeric: bool, whole: bool) -> _Column:
    words = [cell_len(word) for word in header.split()]
    lines = [cell_len(line) for line in header.splitlines()]
    widths = [cell_len(text) for text in texts]
    inside = [cell_len(word) for text in texts for word in text.split()]
    least = max([1, *words, *(widths if numeric or whole else inside)])
    return _Column(header, tuple(texts), numeric, max([1, *lines, *widths]), least)


@dataclass(frozen=True)
class _Fitted:
    """A table that drops columns, and breaks lines between words, to fit the console."""

    columns: tuple[_Column, ...]
    num_rows: int
    title: str | None
    caption: str | None
    best: int | None
    width: int
    drop: tuple[int, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = min(self.width, options.max_width)
        gone: list[int] = []
        others = [place for place in range(len(self.columns) - 1, 0, -1) if place not in self.drop]
        for place in (*self.drop, *others):
            if _total([column.least for column in self._kept(gone)]) <= room:
                break
            gone.append(place)
        kept = self._kept(gone)
        widths = _widths(kept, room)
        drawn = Table(
            box=box.SIMPLE_HEAD,
            title=None if self.title is None else Text(printable(self.title)),
            title_justify="left",
            title_style="bold",
            show_edge=False,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        for column, width in zip(kept, widths, strict=True):
            justify: Literal["left", "right"] = "right" if column.numeric else "left"
            drawn.add_column(Text(column.header), justify=justify, width=width, overflow="fold")
        for number in range(self.num_rows):
            texts = [Text(column.texts[number]) for column in kept]
            drawn.add_row(*texts, style=_BEST if number == self.best else None)
        yield Segment.line()
        yield Constrain(drawn, room)
        said = [self.caption] if self.caption else []
        if gone:
            names = [self.columns[place].header for place in sorted(gone)]
            plain = ", ".join(name.replace("-\n", "").replace("\n", " ") for name in names)
            said.append(f"Left out for lack of room: {plain} (--json has them).")
        if said:
            yield Constrain(Text(printable(" ".join(said), kept="\n"), style="dim"), min(room, 80))
        yield Segment.line()

    def _kept(self, gone: Sequence[int]) -> list[_Column]:
        return [column for place, column in enumerate(self.columns) if place not in gone]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _widths(columns: Sequence[_Column], room: int) -> list[int]:
    """Natural widths, the widest made narrower until all fit, but none below its longest word."""
    widths = [column.natural for column in columns]
    over = _total(widths) - room
    while over > 0:
        able = [i for i, column in enumerate(columns) if widths[i] > column.least]
        if not able:
            break
        widths[max(able, key=widths.__getitem__)] -= 1
        over -= 1
    return widths
