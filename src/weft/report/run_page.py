"""The page of `weft run` and `weft demo`: the medians that the terminal shows, with their spread
and, where there is one, the prediction beside each; then one recorded call of every schedule."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from weft.measure.measurement import RECORDED, Arm, Measurement
from weft.report import cells, figures, units
from weft.report.page import Page
from weft.report.palette import WAIT
from weft.report.run_report import SHARE, headers_of, name_of, rows_of, standing, verdict
from weft.study.prediction import Forecast, Prediction
from weft.timeline import Timeline

PLAIN, FIRST, AUTO, PREDICTED = "#8a9bab", "#0072b2", "#009e73", "#e69f00"


def run_page(
    path: str | os.PathLike[str],
    result: Measurement,
    prediction: Prediction | None = None,
    *,
    title: str,
    summary: str = "",
) -> Path:
    """Writes the page atomically. summary: said before the verdict."""
    page = Page(title, f"{summary} {verdict(result)}".strip())
    page.facts(
        {
            "compute alone": units.duration(result.compute),
            "communication alone": units.duration(result.communication),
            "serial": units.duration(result.serial),
            "ideal": units.duration(result.ideal),
        }
        | {name: units.duration(result.arm(name).seconds) for name in standing(result).first[:1]}
    )
    rounds = len(result.best.samples)
    page.section(
        "Time of a call",
        f"Medians of {rounds} rounds, the fastest first. Thin lines end at the quartiles: half of "
        "the rounds lie between them. Where they overlap widely, do not read much into the order.",
    )
    _legend(page, result, prediction)
    spec, height = times(result, prediction)
    page.figure(spec, height=height)
    order = sorted(range(len(result.every)), key=lambda i: result.every[i].seconds)
    rows = rows_of(result, prediction)
    first = standing(result).first
    crowned = [n for n, i in enumerate(order) if result.every[i].name in first]
    page.table(
        [h.replace("-\n", "").replace("\n", " ") for h in headers_of(prediction)],
        [rows[i] for i in order],
        best=crowned[0] if len(first) == 1 else None,
        caption=SHARE,
    )
    _recorded(page, [result.every[i] for i in order], result.ideal, prediction)
    return page.write(path)


def _legend(page: Page, result: Measurement, prediction: Prediction | None) -> None:
    if prediction is not None:
        page.legend({"measured": PLAIN, "predicted by the simulation": PREDICTED})
        return
    first = standing(result).first
    said = {"measured": PLAIN}
    if first:
        said["fastest" if len(first) == 1 else "the fastest, tied"] = FIRST
    if result.auto is not None:
        said['schedule="auto"'] = AUTO
    page.legend(said)


def times(result: Measurement, prediction: Prediction | None = None) -> tuple[figures.Spec, int]:
    """A bar per schedule with its quartiles, the fastest on top, and a second bar below each for
    its prediction; and the height of the figure."""
    arms = sorted(result.every, key=lambda arm: arm.seconds)
    forecasts = {} if prediction is None else {f.arm.name: f for f in prediction.forecasts}
    known = [forecasts.get(arm.name) for arm in arms]
    first = standing(result).first
    plain = prediction is not None
    colours = [
        PLAIN if plain else AUTO if arm.chose else FIRST if arm.name in first else PLAIN
        for arm in arms
    ]
    shift = 0.2 if prediction is not None else 0.0
    data = [_measured(arms, colours, shift)]
    if prediction is not None:
        data.append(_predicted(known, shift))
    seconds = [arm.quartiles[1] for arm in arms] + [f.seconds for f in known if f is not None]
    names = [escape(name_of(arm)) for arm in arms]
    room = 1.05 if prediction is None else 1.3  # predictions are written after their bars
    return {
        "data": data,
        "layout": {
            "barmode": "overlay",
            "showlegend": False,
            "dragmode": False,
            "margin": {"l": 8, "r": 104, "t": 26, "b": 40},
            "xaxis": {
                "title": {"text": "ms", "standoff": 4},
                "range": [0, room * 1e3 * max([*seconds, result.serial], default=0.0) or 1],
                "fixedrange": True,
                "zeroline": False,
            },
            "yaxis": {
                "range": [len(arms) - 0.4, -0.6],
                "tickvals": list(range(len(arms))),
                "ticktext": names,
                "fixedrange": True,
                "showgrid": False,
                "zeroline": False,
            },
            "shapes": [figures.mark(1e3 * result.ideal)],
            "annotations": [
                figures.mark_label(result.ideal),
                *(_time(row - shift, arm) for row, arm in enumerate(arms)),
            ],
        },
    }, len(arms) * (42 if prediction is not None else 28) + 80


def _time(row: float, arm: Arm) -> figures.Spec:
    """The median and the spread."""
    text = f" {units.duration(arm.seconds)} ± {arm.spread_percent:.0f} %"
    return figures.beside(row, text)


def _measured(arms: Sequence[Arm], colours: list[str], shift: float) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "x": [round(1e3 * arm.seconds, 6) for arm in arms],
        "y": [row - shift for row in range(len(arms))],
        "width": 0.36 if shift else 0.62,
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [round(1e3 * (arm.quartiles[1] - arm.seconds), 6) for arm in arms],
            "arrayminus": [round(1e3 * (arm.seconds - arm.quartiles[0]), 6) for arm in arms],
            "thickness": 1.2,
            "width": 3,
            "color": "#5b6470",
        },
        "marker": {"color": colours},
        "customdata": [
            [escape(name_of(arm)), *map(units.duration, arm.quartiles), f"{arm.speedup:.2f}x"]
            for arm in arms
        ],
        "hovertemplate": "<b>%{customdata[0]}</b><br>measured %{x:.3~f} ms, half of the rounds "
        "from %{customdata[1]} to %{customdata[2]}<br>%{customdata[3]} over serial<extra></extra>",
    }


def _predicted(known: Sequence[Forecast | None], shift: float) -> dict[str, Any]:
    shown = [(row, one) for row, one in enumerate(known) if one is not None]
    return {
        "type": "bar",
        "orientation": "h",
        "x": [round(1e3 * one.seconds, 6) for _, one in shown],
        "y": [row + shift for row, _ in shown],
        "width": 0.36,
        "text": [f"  {units.duration(o.seconds)} ({o.error_percent:+.0f} %)" for _, o in shown],
        "textposition": "outside",
        "cliponaxis": False,
        "marker": {"color": PREDICTED},
        "customdata": [[escape(one.arm.name), f"{one.error_percent:+.1f} %"] for _, one in shown],
        "hovertemplate": "<b>%{customdata[0]}</b><br>predicted %{x:.3~f} ms, error "
        "%{customdata[1]}<extra></extra>",
    }


def _recorded(page: Page, arms: Sequence[Arm], ideal: float, prediction: Prediction | None) -> None:
    """One call of every schedule: where its time went, and its timeline."""
    calls = [replace(arm.timeline, title=name_of(arm)) for arm in arms]
    page.section(
        "Where the time went in one recorded call",
        f"Each row is one call of its own, the middle one of {RECORDED} recorded after the rounds, "
        "so its time is not exactly the median above. Milliseconds, as a mean over the ranks.",
    )
    page.table(
        ["schedule", "this call", "computing", "copying", "both at once", "exposed copying"],
        [where_row(call.title, call) for call in calls],
    )
    page.section(
        "Timelines of these calls",
        "Each drawing is one recorded call. All share one time axis: zooming into one zooms into "
        "all; a double click goes back.",
    )
    page.timelines(calls if prediction is None else prediction.timelines(), ideal=ideal)


def where_row(name: str, timeline: Timeline) -> list[cells.Cell]:
    """Milliseconds of one call, as means over the ranks: in all, computing, copying, both, copying
    without computing. Waiting is neither."""
    ranks = timeline.ranks
    worked = replace(timeline, spans=tuple(s for s in timeline.spans if s.kind != WAIT))

    def mean(values: Iterable[float]) -> float:
        return max(1e3 * sum(values) / max(len(ranks), 1), 0.0)  # not -0.0 from rounding

    return [
        name,
        timeline.seconds * 1e3,
        mean(worked.compute_seconds(rank) for rank in ranks),
        mean(worked.communication_seconds(rank) for rank in ranks),
        mean(worked.overlap_seconds(rank) for rank in ranks),
        mean(worked.exposed_communication(rank) for rank in ranks),
    ]
