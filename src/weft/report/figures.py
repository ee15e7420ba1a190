"""Figures of timelines as plain plotly specifications, made without importing plotly.

A Gantt chart has one trace per kind of task, whose bars are placed by their `base`. So thousands of
spans need only a few traces. Rows are numbers, so that the page can draw two charts in one.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from weft.report import units
from weft.report.palette import COMPUTE_WIDTH, ENGINE_WIDTH, WAIT, Fill, fill_of, lanes_of
from weft.timeline import COMPUTE, Span, Timeline

Spec = dict[str, Any]
"""The input of plotly: `data`, a list of traces, and `layout`."""

_THIN = {"width": 1, "color": "rgba(128,136,148,0.35)"}
"""The line between ranks."""
_OUTLINED = 400
"""The most bars of a trace that are drawn with outlines. With more, outlines hide thin bars."""


def gantt(timeline: Timeline, *, seconds: float, ideal: float | None = None) -> Spec:
    """The timeline on an axis of `seconds`, from its first start. Times are in milliseconds."""
    lanes = lanes_of(timeline)
    rows = {lane: number for number, lane in enumerate(lanes)}
    spans_of: dict[Fill, list[Span]] = {}
    for span in timeline.spans:
        spans_of.setdefault(fill_of(span), []).append(span)
    fills = sorted(spans_of, key=lambda fill: (fill.order, fill.name))
    return {
        "data": [_trace(fill, spans_of[fill], rows, timeline.start) for fill in fills],
        "layout": {
            "barmode": "overlay",
            "showlegend": False,
            "hovermode": "closest",
            "margin": {"l": 8, "r": 14, "t": 22 if ideal else 6, "b": 40},
            "xaxis": {
                "title": {"text": "ms", "standoff": 4},
                "range": [0, seconds * 1e3 * 1.02 or 1],
                "showgrid": True,
                "zeroline": False,
            },
            "yaxis": {
                "range": [len(lanes) - 0.4, -0.6],
                "tickvals": list(range(len(lanes))),
                "ticktext": lane_labels(lanes),
                "fixedrange": True,
                "showgrid": False,
                "zeroline": False,
            },
            "shapes": [
                *row_edges([rank for rank, _ in lanes], _THIN),
                *([mark(ideal * 1e3)] if ideal else []),
            ],
            "annotations": [mark_label(ideal)] if ideal else [],
            "meta": {
                "gantt": True,
                "title": timeline.title,
                "ms": timeline.seconds * 1e3,
                "lanes": [[rank, lane] for rank, lane in lanes],
            },
        },
    }


def gantt_height(timeline: Timeline) -> int:
    """The height in pixels. Lanes are narrower if there are many."""
    num_lanes = len(lanes_of(timeline))
    per_lane = 30 if num_lanes <= 8 else 22 if num_lanes <= 20 else 15
    return max(num_lanes, 2) * per_lane + 70


def lane_labels(lanes: Sequence[tuple[int, str]]) -> list[str]:
    """Labels of lanes. Only the first lane of a rank names the rank."""
    labels, last = [], None
    for rank, lane in lanes:
        head = f"<b>rank {rank}</b>  " if rank != last else ""
        labels.append(head + escape(lane))
        last = rank
    return labels


def names_of(timelines: Sequence[Timeline]) -> list[str]:
    """The titles, or names such as `timeline 2` for those without."""
    return [t.title or f"timeline {i + 1}" for i, t in enumerate(timelines)]


def _trace(
    fill: Fill, spans: Sequence[Span], rows: dict[tuple[int, str], int], zero: float
) -> Spec:
    wait = fill.name == WAIT
    widths = [COMPUTE_WIDTH if span.lane == COMPUTE else ENGINE_WIDTH for span in spans]
    return {
        "type": "bar",
        "orientation": "h",
        "name": fill.name,
        "base": [_ms(span.start - zero) for span in spans],
        "x": [_ms(span.seconds) for span in spans],
        "y": [rows[span.rank, span.lane] for span in spans],
        "width": widths[0] if len(set(widths)) == 1 else widths,
        # The page makes hover texts from these. The texts themselves would be most of its size.
        "customdata": [[span.task, span.kind, span.num_bytes, span.num_flops] for span in spans],
        "marker": {
            "color": fill.colour,
            "opacity": 0.15 if wait else 1,
            "line": {"width": 0 if wait or len(spans) > _OUTLINED else 0.5},
        },
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 6)


def row_edges(keys: Sequence[object], line: Spec) -> list[Spec]:
    """Lines between rows with different keys. keys: one of each row."""
    return [
        {
            "type": "line",
            "xref": "paper",
            "x0": 0,
            "x1": 1,
            "y0": row - 0.5,
            "y1": row - 0.5,
            "line": line,
        }
        for row in range(1, len(keys))
        if keys[row] != keys[row - 1]
    ]


def beside(row: float, text: str) -> Spec:
    """A text in a column beside the bars, where no width of the screen cuts it off."""
    return {
        "x": 1,
        "xref": "paper",
        "y": row,
        "xanchor": "left",
        "showarrow": False,
        "text": text,
        "font": {"size": 11},
    }


def mark(ms: float, colour: str = "#d55e00") -> Spec:
    """A dotted line at a time in milliseconds."""
    return {
        "type": "line",
        "yref": "paper",
        "x0": ms,
        "x1": ms,
        "y0": 0,
        "y1": 1,
        "line": {"width": 1.5, "dash": "dot", "color": colour},
    }


def mark_label(seconds: float) -> Spec:
    """The label of the line at the ideal."""
    return {
        "x": seconds * 1e3,
        "y": 1,
        "yref": "paper",
        "yanchor": "bottom",
        "showarrow": False,
        "text": f"ideal {units.duration(seconds)}",
        "font": {"size": 11},
    }
