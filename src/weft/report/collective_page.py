"""The page of `weft explore --collective`: time over size for every way, and all numbers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from weft.report import cells
from weft.report.figures import Spec
from weft.report.page import Page
from weft.report.palette import COLOURS
from weft.report.units import byte_size, duration

Curves = Mapping[str, Sequence[tuple[float, float]]]
"""By the name of a way: bytes and seconds, in the order of bytes."""
_DASHES = ("solid", "dash", "dot")


def write_collective_page(
    path: str | os.PathLike[str],
    title: str,
    summary: str,
    curves: Mapping[str, Curves],
    headers: Sequence[str],
    rows: Sequence[Sequence[cells.Cell]],
    notes: Sequence[str],
) -> Path:
    """Writes the page atomically. curves: a figure for each name, e.g. a number of nodes."""
    page = Page(title, summary)
    for name, some in curves.items():
        page.section(name, "Both axes are logarithmic; lower is faster.")
        page.legend(
            {
                f"{way} (dashed)" if number >= len(COLOURS) else way: _colour(number)
                for number, way in enumerate(some)
            }
        )
        page.figure(times(some), height=400)
    page.section("All numbers")
    page.table(headers, rows)
    for note in notes:
        page.text(note)
    return page.write(path)


def times(curves: Curves) -> Spec:
    """A line with marks for each way; colours repeat with another dash."""
    sizes = sorted({size for points in curves.values() for size, _ in points})
    return {
        "data": [
            {
                "type": "scatter",
                "mode": "lines+markers",
                "x": [size for size, _ in points],
                "y": [1e6 * seconds for _, seconds in points],
                "line": {
                    "color": _colour(number),
                    "dash": _DASHES[number // len(COLOURS) % len(_DASHES)],
                },
                "customdata": [[byte_size(size), duration(seconds)] for size, seconds in points],
                "hovertemplate": f"<b>{escape(way)}</b><br>%{{customdata[0]}}: %{{customdata[1]}}"
                "<extra></extra>",
            }
            for number, (way, points) in enumerate(curves.items())
        ],
        "layout": {
            "showlegend": False,
            "dragmode": False,
            "hovermode": "closest",
            "margin": {"l": 8, "r": 24, "t": 14, "b": 44},
            "xaxis": {
                "type": "log",
                "tickvals": sizes,
                "ticktext": [byte_size(size) for size in sizes],
                "fixedrange": True,
            },
            "yaxis": {
                "type": "log",
                "title": {"text": "time"},
                "tickvals": [10.0**power for power in range(-1, 8)],
                "ticktext": [duration(10.0**power / 1e6) for power in range(-1, 8)],
                "fixedrange": True,
            },
        },
    }


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]
