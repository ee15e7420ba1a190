"""Offline HTML pages: sections of text, facts, tables and interactive figures in one file.

A page contains everything it needs, including plotly.js, so it opens without a network and can be
mailed. The library is trimmed to 1 MB by docs/generate/plotly_bundle.py.
    Page("title").section("Speedup").figure(spec, height=300).table(headers, rows).write("out.html")
"""

from __future__ import annotations

import gzip
import json
import os
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol, Self

from weft.files import write_atomically
from weft.report import cells, figures, units
from weft.report.palette import COLOURS, WAIT, fills_of
from weft.timeline import Timeline

Facts = Mapping[str, str]
"""Key figures, by name."""

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:"
)
"""The policy makes the browser refuse every request, which guarantees that a page is offline."""

_OPEN_UP_TO = 4
"""With more timelines than this, only the first is open."""

_MANY_LANES = 20
"""With more lanes than this, the chooser starts with one rank, and only one timeline is open."""


PACKED_ABOVE = 200_000
"""The characters of all figures together, above which they are compressed."""


class PlotlyFigure(Protocol):
    """The part of `plotly.graph_objects.Figure` that a page needs."""

    def to_json(self) -> str | None: ...


class Page:
    """A page under construction. Every method appends to the page and returns it."""

    def __init__(self, title: str, summary: str = "") -> None:
        self.title = title
        self._parts: list[str] = []
        self._figures: dict[str, str] = {}
        """The specification of each figure as JSON, by the id of its element."""
        self._open = False
        if summary:
            self._parts.append(f'<p class="summary">{escape(summary)}</p>\n')

    def section(self, title: str, text: str = "") -> Self:
        """Starts a section with a heading and a paragraph."""
        self._parts.append(f"{self._close()}<section>\n<h2>{escape(title)}</h2>\n")
        self._open = True
        return self.text(text) if text else self

    def text(self, text: str) -> Self:
        """A paragraph."""
        self._parts.append(f"<p>{escape(text)}</p>\n")
        return self

    def legend(
        self,
        colours: Mapping[str, str],
        faint: Sequence[str] = (),
        symbols: Mapping[str, str] | None = None,
    ) -> Self:
        """Names and their colours. Unlike a legend of plotly, it wraps on narrow screens. symbols:
        the markers of names, as plotly calls them: circle, circle-open, diamond, diamond-open."""
        items = "".join(
            f'<li><i class="{(symbols or {}).get(name, "")}" style="background:{colour};'
            f'border-color:{colour}{";opacity:.2" if name in faint else ""}"></i>'
            f"{escape(name)}</li>"
            for name, colour in colours.items()
        )
        self._parts.append(f'<ul class="legend">{items}</ul>\n')
        return self

    def facts(self, facts: Facts) -> Self:
        """A row of key figures."""
        items = (
            f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>\n"
            for name, value in facts.items()
        )
        self._parts.append(f'<dl class="facts">\n{"".join(items)}</dl>\n')
        return self

    def figure(
        self,
        figure: Mapping[str, Any] | PlotlyFigure,
        *,
        height: int = 360,
        min_width: int = 0,
        caption: str = "",
    ) -> Self:
        """A plotly figure, as a specification or a `Figure`. Colours, fonts and grid come from the
        page. On screens narrower than `min_width` pixels, it scrolls instead of shrinking."""
        drawn, _ = self._figure(figure, height, min_width)
        text = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
        self._parts.append(f"<figure>{drawn}{text}</figure>\n")
        return self

    def table(
        self,
        headers: Sequence[str],
        rows: Sequence[Sequence[cells.Cell]],
        *,
        best: int | None = None,
        caption: str = "",
    ) -> Self:
        """A table. Numbers are aligned right, row `best` is marked. Narrow screens scroll it."""
        columns = cells.columns_of(headers, rows)
        numeric = [' class="number"' if cells.is_numeric(column) else "" for column in columns]
        head = "".join(f"<th{c}>{escape(h)}</th>" for h, c in zip(headers, numeric, strict=True))
        body = "".join(
            ('<tr class="best">' if number == best else "<tr>")
            + "".join(f"<td{c}>{escape(text)}</td>" for text, c in zip(row, numeric, strict=True))
            + "</tr>\n"
            for number, row in enumerate(zip(*columns, strict=True))
        )
        text = f"<caption><span>{escape(caption)}</span></caption>" if caption else ""
        self._parts.append(
            f'<div class="scroll" tabindex="0"><table>{text}<thead><tr>{head}</tr></thead>\n'
            f"<tbody>\n{body}</tbody></table></div>\n"
        )
        return self

    def timelines(
        self,
        timelines: Sequence[Timeline],
        *,
        ideal: float | None = None,
        seconds: float | None = None,
    ) -> Self:
        """Every timeline as a Gantt chart on one axis, and a chooser that draws two of them in one
        chart. ideal: seconds, marked on every chart. seconds: the end of the axis before zooming
        out; by default that of the longest timeline."""
        if not timelines:
            return self.text("Nothing was recorded.")
        seconds = seconds or max(timeline.seconds for timeline in timelines)
        names = figures.names_of(timelines)
        charts, ids = [], []
        for number, (timeline, name) in enumerate(zip(timelines, names, strict=True)):
            spec = figures.gantt(timeline, seconds=seconds, ideal=ideal)
            drawn, id_ = self._figure(spec, figures.gantt_height(timeline), 0)
            few = len(timelines) <= _OPEN_UP_TO and len(timeline.lanes()) <= _MANY_LANES
            open_ = " open" if number == 0 or few else ""
            charts.append(
                f"<details{open_}><summary><span>{escape(name)}</span>"
                f"<output>{units.duration(timeline.seconds)}</output></summary>{drawn}</details>\n"
            )
            ids.append(id_)
        fills = fills_of(timelines)
        self.legend({f.name: f.colour for f in fills}, faint=(WAIT,))
        if len(timelines) > 1:
            self._parts.append(_overlay(timelines, names, ids))
        self._parts.extend(charts)
        return self

    def choices(self, label: str, panels: Mapping[str, Callable[[Page], object]]) -> Self:
        """One of several panels, chosen from a list. A panel is what its function adds to the page.

        In a figure whose `layout.meta.picks` is the label in lower case, a click chooses a panel:
        the data of its points start with the number of a panel and the name of a timeline in it.
        """
        numbers = [str(number) for number in range(len(panels))]
        chooser = _choice(label, list(panels), numbers, 0)
        self._parts.append(f'<div class="choices"><div class="choose">{chooser}</div>\n')
        for number, fill in zip(numbers, panels.values(), strict=True):
            hidden = "" if number == "0" else " hidden"
            self._parts.append(f'<div data-panel="{number}"{hidden}>\n')
            fill(self)
            self._parts.append("</div>\n")
        self._parts.append("</div>\n")
        return self

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Writes the page atomically."""
        return write_atomically(path, self._document())

    def _figure(
        self, figure: Mapping[str, Any] | PlotlyFigure, height: int, min_width: int
    ) -> tuple[str, str]:
        id_ = f"figure-{len(self._figures) + 1}"
        spec = dict(figure) if isinstance(figure, Mapping) else json.loads(figure.to_json() or "{}")
        if "layout" in spec:  # a Figure has its own template; the page has one for all
            spec["layout"] = {k: v for k, v in spec["layout"].items() if k != "template"}
        style = f"height:{height}px" + (f";min-width:{min_width}px" if min_width else "")
        self._figures[id_] = _json(spec)
        return f'<div class="scroll"><div class="plot" id="{id_}" style="{style}"></div></div>', id_

    def _close(self) -> str:
        return "</section>\n" if self._open else ""

    def _document(self) -> Iterator[str]:
        here = files("weft.report")
        css = here.joinpath("page.css").read_text("utf-8")
        js = here.joinpath("page.js").read_text("utf-8")
        yield (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            '<meta name="color-scheme" content="light dark">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
            f"<title>{escape(self.title)}</title>\n<style>\n{css}</style>\n</head>\n<body>\n<main>\n"
            f"<h1>{escape(self.title)}</h1>\n"
            "<noscript><p>The figures of this page need JavaScript.</p></noscript>\n"
        )
        yield from self._parts
        yield f"{self._close()}</main>\n"
        if self._figures:
            yield from _data(self._figures)
            yield f"<script>{plotly_js()}</script>\n"
            yield f"<script>\nconst COLOURS = {_json(COLOURS)};\n{js}</script>\n"
        yield "</body>\n</html>\n"


def _data(specs: Mapping[str, str]) -> Iterator[str]:
    """The figures as JSON; if they are large, compressed together, which makes them eight times as
    small: a page with many timelines should be small enough to be mailed."""
    if sum(map(len, specs.values())) <= PACKED_ABOVE:
        for id_, spec in specs.items():
            yield f'<script type="application/json" data-figure="{id_}">{spec}</script>\n'
        return
    packed = gzip.compress(json.dumps(specs).encode(), mtime=0)
    yield f'<script type="application/gzip" data-figures>{b64encode(packed).decode()}</script>\n'


def _overlay(timelines: Sequence[Timeline], names: Sequence[str], ids: Sequence[str]) -> str:
    fastest = min(range(len(timelines)), key=lambda i: timelines[i].seconds)
    second = fastest if fastest != 0 else 1

    ranks = sorted({rank for timeline in timelines for rank in timeline.ranks})
    rank_values = ["all", *map(str, ranks)]
    many = max(len(timeline.lanes()) for timeline in timelines) > _MANY_LANES

    return (
        '<div class="overlay"><div class="choose">'
        + _choice("Upper", names, ids, 0)
        + _choice("Lower", names, ids, second)
        + _choice("Rank", rank_values, rank_values, 1 if many else 0)
        + '<output></output></div><div class="plot" data-overlay></div></div>\n'
    )


def _choice(label: str, names: Sequence[str], values: Sequence[str], chosen: int) -> str:
    options = "".join(
        f'<option value="{value}"{" selected" if i == chosen else ""}>{escape(name)}</option>'
        for i, (name, value) in enumerate(zip(names, values, strict=True))
    )
    return f'<label>{label} <select name="{label.lower()}">{options}</select></label>'


def _json(value: object) -> str:
    """JSON that is safe inside a script element, whatever its strings contain."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def plotly_js() -> str:
    """The plotly library as JavaScript, without the kinds of traces that no page draws."""
    return files("weft.report").joinpath("plotly.min.js").read_text("utf-8")
