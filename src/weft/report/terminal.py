"""Timelines for the terminal, of a limited width, and readable without colour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style

from weft.report import units
from weft.report.palette import COPY, WAIT, Fill, fills_of, lanes_of, lighter
from weft.report.raster import EIGHTHS, Cell, Key, busy_shares, rasterize
from weft.timeline import COMPUTE, Span, Timeline

FOLD_ABOVE = 3
"""With more engine lanes than this, a rank shows one row for all: how many of them are busy."""

_LEFT = " ▏▎▍▌▋▊▉█"
_LOWER = " ▁▂▃▄▅▆▇█"
_ASCII = str.maketrans("─┴┊┤·…", "-+:|.~")
_DIM = Style(dim=True)
_BOLD = Style(bold=True)


def draw(
    timelines: Sequence[Timeline], width: int = 100, unit: units.Unit | None = None
) -> RenderableType:
    """The timelines below each other on one time axis, with one row per rank and lane.

    Colour and Unicode are used only if the console supports them.
    """
    return _Drawing(tuple(timelines), width, unit)


@dataclass(frozen=True)
class _Row:
    """A row: its label, and its lanes, which are one lane or all engines of a rank."""

    label: str
    lanes: tuple[tuple[Span, ...], ...]


@dataclass(frozen=True)
class _Drawing:
    timelines: tuple[Timeline, ...]
    width: int
    unit: units.Unit | None

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        width = min(self.width, options.max_width)
        return Measurement(width, width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(self.width, options.max_width)
        colour = console.color_system is not None and not console.no_color
        for line in self._lines(width, _Ink(colour, options.ascii_only)):
            yield from Segment.adjust_line_length(list(Segment.simplify(line)), width, pad=False)
            yield Segment.line()

    def _lines(self, width: int, ink: _Ink) -> Iterator[list[Segment]]:
        rows = {id(timeline): _rows(timeline) for timeline in self.timelines}
        every_row = [row for some in rows.values() for row in some]
        if not every_row:
            yield [Segment("nothing was recorded", _DIM)]
            return
        gutter = min(max(cell_len(row.label) for row in every_row), max(width // 2, 1)) + 1
        num_cells = max(width - gutter - 1, 1)
        seconds = max(timeline.seconds for timeline in self.timelines)
        unit = self.unit or units.unit_of(seconds)
        ticks = units.ticks(seconds / units.SECONDS[unit], max(num_cells // 10, 1))
        columns = [
            min(round(t * units.SECONDS[unit] / seconds * num_cells) if seconds else 0, num_cells)
            for t in ticks
        ]
        for timeline in self.timelines:
            end = round(timeline.seconds / seconds * num_cells) if seconds else 0
            total = units.duration(timeline.seconds, unit)
            yield _heading(timeline.title or "timeline", total, gutter + end, width, ink)
            for row in rows[id(timeline)]:
                label = set_cell_size(row.label, gutter - 1) + " "
                drawn = _row(row, timeline.start, seconds, num_cells, frozenset(columns), ink)
                yield [Segment(ink.text(label), _DIM), *drawn]
        yield from _axis(ticks, columns, gutter, num_cells, unit, ink)
        folded = any(len(row.lanes) > 1 for row in every_row)
        fills = fills_of(self.timelines)
        if folded and not ink.colour:  # a row of several engines shows how many are busy, not which
            alone = [Timeline(row.lanes[0]) for row in every_row if len(row.lanes) == 1]
            fills = fills_of(alone)
        yield from _legend(fills, folded, width, ink)


@dataclass(frozen=True)
class _Ink:
    """The abilities of the console, and the look of cells on it."""

    colour: bool
    ascii: bool

    def text(self, text: str) -> str:
        return text.translate(_ASCII).encode("ascii", "replace").decode() if self.ascii else text

    def style(self, key: Key | None) -> str | None:
        return None if key is None else lighter(key[0].colour, 0.3 * key[1])

    def sample(self, fill: Fill) -> Segment:
        if self.ascii:
            return Segment(fill.ascii)
        return Segment("█", Style(color=fill.colour)) if self.colour else Segment(fill.glyph)

    def cell(self, cell: Cell, empty: Segment) -> Segment:
        if cell.left is None and cell.right is None:
            return empty
        if not self.colour or self.ascii:
            return self._plain_cell(cell, empty)
        left, right = self.style(cell.left), self.style(cell.right)
        if left is None:  # no Unicode block starts at the right, so draw the empty left inverted
            return Segment(_LEFT[cell.eighths], Style(color=right, reverse=True))
        return Segment(_LEFT[cell.eighths], Style(color=left, bgcolor=right))

    def _plain_cell(self, cell: Cell, empty: Segment) -> Segment:
        first = cell.eighths * 2 >= EIGHTHS
        shown = cell.left if first else cell.right
        full = cell.left[0].glyph == "█" if cell.left else False
        if not self.ascii and full and cell.right is None:
            return Segment(_LEFT[cell.eighths])
        late = cell.left is None and cell.right is not None and cell.right[0].glyph == "█"
        if not self.ascii and late and 3 <= cell.eighths <= 5:
            return Segment("▐")
        if shown is None:
            return empty
        return Segment(shown[0].ascii if self.ascii else shown[0].glyph)

    def height(self, share: float, num_lanes: int, fill: Fill | None, empty: Segment) -> Segment:
        eighths = min(round(share * EIGHTHS), EIGHTHS)
        if share > 0.02:
            eighths = max(eighths, 1)
        if eighths == 0:
            return empty
        if self.ascii:
            return Segment(str(min(max(round(share * num_lanes), 1), 9)))
        style = Style(color=(fill or COPY).colour) if self.colour else None
        return Segment(_LOWER[eighths], style)


def _rows(timeline: Timeline) -> list[_Row]:
    lanes: dict[tuple[int, str], list[Span]] = {lane: [] for lane in lanes_of(timeline)}
    for span in timeline.spans:
        lanes[span.rank, span.lane].append(span)
    rows: list[_Row] = []
    for rank in timeline.ranks:
        mine = {lane: tuple(spans) for (r, lane), spans in lanes.items() if r == rank}
        engines = {lane: spans for lane, spans in mine.items() if lane != COMPUTE}
        shown = [_Row(COMPUTE, (mine[COMPUTE],))] if COMPUTE in mine else []
        if len(engines) > FOLD_ABOVE:
            shown.append(_Row(f"{len(engines)} engines", tuple(engines.values())))
        else:
            shown.extend(_Row(lane, (spans,)) for lane, spans in engines.items())
        head = f"rank {rank} "
        rows.extend(
            _Row((head if number == 0 else " " * len(head)) + row.label, row.lanes)
            for number, row in enumerate(shown)
        )
    return rows


def _row(
    row: _Row, origin: float, seconds: float, num_cells: int, grid: frozenset[int], ink: _Ink
) -> Iterator[Segment]:
    def empty(column: int) -> Segment:
        on_grid = column in grid and column > 0
        return Segment(ink.text("┊") if on_grid else " ", _DIM if on_grid else None)

    if len(row.lanes) == 1:
        for column, cell in enumerate(rasterize(row.lanes[0], origin, seconds, num_cells)):
            yield ink.cell(cell, empty(column))
        return
    for column, (share, fill) in enumerate(busy_shares(row.lanes, origin, seconds, num_cells)):
        yield ink.height(share, len(row.lanes), fill, empty(column))


def _heading(title: str, total: str, end: int, width: int, ink: _Ink) -> list[Segment]:
    """The title, a line as long as the timeline, and the total time at its end."""
    room = width - cell_len(total) - 3
    if cell_len(title) > room:
        title = title[: max(room - 1, 0)] + "…"
    rule = max(end - cell_len(title) - cell_len(total) - 3, 0)
    return [
        Segment(ink.text(title) + " ", _BOLD),
        Segment(ink.text("─") * rule + (" " if rule else ""), _DIM),
        Segment(total, _BOLD),
        Segment(ink.text(" ┤") if rule else "", _DIM),
    ]


def _axis(
    ticks: Sequence[float],
    columns: Sequence[int],
    gutter: int,
    num_cells: int,
    unit: str,
    ink: _Ink,
) -> Iterator[list[Segment]]:
    line = ["─"] * (num_cells + 1)
    numbers = [" "] * (gutter + num_cells + 1)
    for number, (tick, column) in enumerate(zip(ticks, columns, strict=True)):
        line[column] = "┴"
        text = f"{tick:g}" if number else f"0 {unit}"
        start = gutter + column - (len(text) // 2 if number else 0)
        start = min(start, len(numbers) - len(text))
        if number == 0 or all(c == " " for c in numbers[start - 1 : start + len(text)]):
            numbers[start : start + len(text)] = text
    yield [Segment(" " * gutter + ink.text("".join(line)), _DIM)]
    yield [Segment("".join(numbers).rstrip(), _DIM)]


def _legend(fills: Sequence[Fill], folded: bool, width: int, ink: _Ink) -> Iterator[list[Segment]]:
    entries = [
        [ink.sample(fill), Segment(ink.text(f" {fill.name}"))]
        for fill in fills
        if fill.name != WAIT
    ]
    if folded:
        sample = "19" if ink.ascii else _LOWER[1] + _LOWER[4] + _LOWER[8]
        style = Style(color=COPY.colour) if ink.colour and not ink.ascii else None
        entries.append([Segment(sample, style), Segment(" how many engines are busy")])
    line: list[Segment] = []
    for entry in entries:
        if line and Segment.get_line_length([*line, *entry]) + 3 > width:
            yield line
            line = []
        line += [Segment("   "), *entry] if line else entry
    if line:
        yield line
