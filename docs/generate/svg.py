"""Charts as small SVG files, for documents without scripts: points, lines and bars.

chart([Series("measured", "#d55e00", points)], Axis("bytes", log=True), Axis("us", log=True))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from weft.report.units import digits, ticks

WIDTH, HEIGHT = 760, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 20, 40, 52
_TEXT, _FAINT, _LINE = "#1d2127", "#5d6673", "#dfe2e6"


@dataclass(frozen=True)
class Series:
    """Points of one colour, or a line through them. A series without a name has no legend."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    line: bool = False


@dataclass(frozen=True)
class Axis:
    """An axis: its label, its scale, and the format of its values."""

    label: str
    log: bool = False
    text: Callable[[float], str] = digits

    def scale(self, values: Sequence[float], zero: bool = False) -> _Scale:
        """The scale from the smallest to the largest value, or, if linear and `zero`, from zero."""
        least, most = min(values), max(values)
        if self.log:
            low, high = log10(least), log10(most)
            room = 0.03 * max(high - low, 1e-3)
            return _Scale(True, low - room, high + room)
        return _Scale(False, 0.0 if zero else min(0.0, least), 1.08 * most)


@dataclass(frozen=True)
class _Scale:
    log: bool
    low: float
    high: float

    def at(self, value: float) -> float:
        """The position of a value: 0 at the low end, 1 at the high end."""
        place = log10(value) if self.log else value
        return (place - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        if not self.log:
            return [t for t in ticks(self.high, 6) if t >= self.low]
        powers = [10.0**p for p in range(ceil(self.low), floor(self.high) + 1)]
        if len(powers) > 2:
            return powers
        fine = [m * 10.0**p for p in range(floor(self.low), ceil(self.high)) for m in (1, 2, 5)]
        return [t for t in fine if self.low <= log10(t) <= self.high]


def chart(
    series: Sequence[Series], x: Axis, y: Axis, *, title: str = "", diagonal: bool = False
) -> str:
    """Series over two axes. diagonal: both axes have the same scale, with a line where x = y."""
    xs = [px for one in series for px, _ in one.points]
    ys = [py for one in series for _, py in one.points]
    if diagonal:
        xs = ys = [*xs, *ys]
    across, up = x.scale(xs), y.scale(ys)
    parts = [*_frame(title, series), *_horizontals(up, y), *_verticals(across, x)]
    if diagonal:
        ends = [(_x(end), _y(end)) for end in (0.0, 1.0)]
        parts.append(_path(ends, _FAINT, 'stroke-width="1" stroke-dasharray="4 3"'))
    many = sum(len(one.points) for one in series) > 250
    for one in series:
        places = [(_x(across.at(px)), _y(up.at(py))) for px, py in one.points]
        if one.line:
            parts.append(_path(places, one.colour, 'stroke-width="2"'))
        else:
            dots = "".join(f"M{px:.1f} {py:.1f}h0" for px, py in places)
            size = 3 if many else 8
            parts.append(
                f'<path d="{dots}" stroke="{one.colour}" stroke-width="{size}" '
                'stroke-linecap="round" stroke-opacity="0.75" fill="none"/>'
            )
    return _document(parts)


def bars(
    labels: Sequence[str],
    groups: Sequence[tuple[str, str, Sequence[float]]],
    y: Axis,
    *,
    title: str = "",
    marks: tuple[str, str, Sequence[float]] | None = None,
    line: float | None = None,
) -> str:
    """Grouped bars. groups: (name, colour, one value per label). marks: a stroke per label. line: a
    horizontal line across all labels."""
    values = [value for _, _, some in groups for value in some]
    values += list(marks[2]) if marks else []
    up = y.scale([*values, line or 0.0])
    series = [
        Series(name, colour, ()) for name, colour, _ in [*groups, *([marks] if marks else [])]
    ]
    parts = [*_frame(title, series), *_horizontals(up, y)]
    step = (WIDTH - _LEFT - _RIGHT) / len(labels)
    width = 0.72 * step / len(groups)
    ground = _y(up.at(0.0))
    for number, label in enumerate(labels):
        left = _LEFT + number * step + 0.14 * step
        parts.append(_label(left + 0.36 * step, HEIGHT - _BOTTOM + 18, label, "middle"))
        for place, (_, colour, some) in enumerate(groups):
            top = _y(up.at(some[number]))
            parts.append(
                f'<rect x="{left + place * width:.1f}" y="{min(top, ground):.1f}" '
                f'width="{width:.1f}" height="{abs(ground - top):.1f}" fill="{colour}"/>'
            )
        if marks is not None:
            at = _y(up.at(marks[2][number]))
            ends = [(left, at), (left + 0.72 * step, at)]
            parts.append(_path(ends, marks[1], 'stroke-width="2.5"'))
    if line is not None:
        ends = [(_x(0.0), _y(up.at(line))), (_x(1.0), _y(up.at(line)))]
        parts.append(_path(ends, _FAINT, 'stroke-width="1" stroke-dasharray="4 3"'))
    return _document(parts)


def _x(share: float) -> float:
    return _LEFT + share * (WIDTH - _LEFT - _RIGHT)


def _y(share: float) -> float:
    return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)


def _frame(title: str, series: Sequence[Series]) -> Iterator[str]:
    """The title, the legend, and a white background, so that it is readable on dark pages."""
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff"/>'
    yield (
        f'<text x="{_LEFT}" y="24" font-size="14" font-weight="600" fill="{_TEXT}">'
        f"{escape(title)}</text>"
    )
    right = float(WIDTH - _RIGHT)
    for one in reversed([one for one in series if one.name]):
        yield _label(right, 24, one.name, "end")
        right -= 6.4 * len(one.name) + 8
        square = f'x="{right - 10:.1f}" y="15" width="10" height="10" rx="2"'
        yield f'<rect {square} fill="{one.colour}"/>'
        right -= 24


def _horizontals(scale: _Scale, axis: Axis) -> Iterator[str]:
    for tick in scale.ticks():
        at = _y(scale.at(tick))
        yield _path([(_x(0.0), at), (_x(1.0), at)], _LINE, 'stroke-width="1"')
        yield _label(_LEFT - 8, at + 4, axis.text(tick), "end")
    middle = _y(0.5)
    yield (
        f'<text x="16" y="{middle:.0f}" transform="rotate(-90 16 {middle:.0f})" '
        f'text-anchor="middle" fill="{_FAINT}">{escape(axis.label)}</text>'
    )


def _verticals(scale: _Scale, axis: Axis) -> Iterator[str]:
    for tick in scale.ticks():
        at = _x(scale.at(tick))
        yield _path([(at, _y(0.0)), (at, _y(1.0))], _LINE, 'stroke-width="1"')
        yield _label(at, HEIGHT - _BOTTOM + 18, axis.text(tick), "middle")
    yield _label(_x(0.5), HEIGHT - 12, axis.label, "middle")


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{_FAINT}">'
        f"{escape(text)}</text>"
    )


def _path(places: Sequence[tuple[float, float]], colour: str, style: str) -> str:
    points = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    return f'<path d="M{points}" stroke="{colour}" fill="none" {style}/>'


def _document(parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )
