"""Figures of an exploration: speedups of scenarios x schedules, bars, and where the time went.

They are plain plotly specifications, as in `figures`. Schedules are rows, so that their names are
horizontal.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import log2
from typing import Any

from weft.report.figures import Spec, beside, mark, row_edges
from weft.report.units import duration
from weft.schedule import ENGINES, Schedule
from weft.study.exploration import Exploration, Scenario, ScheduleOutcome

LOSSES = (
    # loss, label, colour
    ("exposed_communication", "exposed communication", "#e69f00"),
    ("decomposition", "cost of splitting", "#009e73"),
    ("contention", "contention", "#d55e00"),
    ("launch", "launch", "#7d5ba6"),
)
IDEAL_COLOUR = "#8a9bab"
EDGE = {"width": 2, "color": IDEAL_COLOUR}
"""The line between rows of different kinds."""
COMPARED = (
    # schedule (None: the best), colour
    (None, "#0072b2"),
    ("adaptive@dma", "#009e73"),
    ("shard-p2p@dma", "#d55e00"),
)
SLOWER, EQUAL, FASTER = "#f0935a", "#f1f3f5", "#6cb0de"
ON_SHADES = "#1d2127"
"""The colour of numbers on these three and all between them, which are light enough for it."""

PICKS = "scenario"
"""The list in which a click into the heat map chooses."""

_TICKS = (0.125, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
_LABELLED_UP_TO = 40
"""With more scenarios than this, the cells of the heat map are too narrow for numbers."""


def schedules_of(scenarios: Sequence[Scenario]) -> list[Schedule]:
    """All schedules that were explored or refused, grouped by engine."""
    seen = dict.fromkeys(
        schedule
        for scenario in scenarios
        for schedule in (
            *(outcome.schedule for outcome in scenario.outcomes),
            *(schedule for schedule, _ in scenario.refused),
        )
    )
    return sorted(seen, key=lambda schedule: ENGINES.index(schedule.engine))


def heat_map(exploration: Exploration) -> tuple[Spec, int, int]:
    """The speedup of every schedule in every scenario, and the height and width of the figure."""
    scenarios = exploration.scenarios
    schedules = schedules_of(scenarios)
    labels = [scenario.shape.label for scenario in scenarios]
    ticks_below = [_with_layer(scenario) for scenario in scenarios]
    speedups = [[_speedup(scenario, schedule) for scenario in scenarios] for schedule in schedules]
    shades = [[None if s is None else log2(s) for s in row] for row in speedups]
    least = min((z for row in shades for z in row if z is not None), default=0.0)
    most = max((z for row in shades for z in row if z is not None), default=0.0)
    least, most = min(least, -0.05), max(most, 0.05)
    ticks = [tick for tick in _TICKS if least - 0.01 <= log2(tick) <= most + 0.01]
    spec: Spec = {
        "data": [
            {
                "type": "heatmap",
                "x": list(range(len(labels))),
                "y": list(range(len(schedules))),
                "z": shades,
                "zmin": least,
                "zmax": most,
                "colorscale": [[0, SLOWER], [-least / (most - least), EQUAL], [1, FASTER]],
                "colorbar": {
                    "title": {"text": "speedup", "side": "right"},
                    "tickvals": [log2(tick) for tick in ticks],
                    "ticktext": [f"{tick:g}x" for tick in ticks],
                },
                "customdata": [
                    [_cell(number, scenario, schedule) for number, scenario in enumerate(scenarios)]
                    for schedule in schedules
                ],
                "hovertemplate": "%{customdata[2]}<extra></extra>",
            }
        ],
        "layout": {
            "margin": {"l": 8, "r": 8, "t": 10, "b": 30},
            "meta": {"picks": PICKS},
            "dragmode": False,
            "xaxis": _categories(ticks_below, tickangle=_angle(ticks_below)),
            "yaxis": {
                **_categories([escape(schedule.name) for schedule in schedules]),
                "range": [len(schedules) - 0.5, -0.5],
            },
            "shapes": row_edges([schedule.engine for schedule in schedules], EDGE),
        },
    }
    if len(labels) <= _LABELLED_UP_TO:
        spec["data"][0]["text"] = [
            ["" if speedup is None else f"{speedup:.2f}" for speedup in row] for row in speedups
        ]
        spec["data"][0]["texttemplate"] = "%{text}"
        spec["data"][0]["textfont"] = {"size": 11, "color": ON_SHADES}
    return spec, 24 * len(schedules) + 60 + _slanted(ticks_below), 240 + 40 * min(len(labels), 200)


def bars(exploration: Exploration) -> tuple[Spec, int]:
    """Per scenario, the best schedule, adaptive and shard-p2p against serial (1x) and ideal, and
    the width of the figure."""
    scenarios = exploration.scenarios
    labels = [scenario.shape.label for scenario in scenarios]
    data: list[Spec] = []
    for name, colour in COMPARED:
        found = [s.best if name is None else known(s, name) for s in scenarios]
        names = ["" if one is None else escape(one.schedule.name) for one in found]
        data.append(
            {
                "type": "bar",
                "x": labels,
                "y": [None if one is None else round(one.speedup, 4) for one in found],
                "marker": {"color": colour},
                "customdata": [f"best: {one}" for one in names] if name is None else names,
                "hovertemplate": "%{customdata} <b>%{y:.2f}x</b><extra></extra>",
            }
        )
    data.append(
        {
            "type": "scatter",
            "mode": "markers",
            "x": labels,
            "y": [round(s.serial / s.ideal, 4) if s.ideal else None for s in scenarios],
            "marker": {
                "symbol": "line-ew",
                "size": 22,
                "line": {"width": 2.5, "color": IDEAL_COLOUR},
            },
            "hovertemplate": "ideal <b>%{y:.2f}x</b><extra></extra>",
        }
    )
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1}
    return {
        "data": data,
        "layout": {
            "barmode": "group",
            "bargap": 0.25,
            "hovermode": "x unified",
            "showlegend": False,
            "dragmode": False,
            "xaxis": {"type": "category", "fixedrange": True, "tickangle": _angle(labels)},
            "yaxis": {
                "title": {"text": "speedup over serial"},
                "ticksuffix": "x",
                "rangemode": "tozero",
                "fixedrange": True,
            },
            "shapes": [{**line, "line": {"width": 1.5, "dash": "dot", "color": IDEAL_COLOUR}}],
        },
    }, 120 + 44 * min(len(labels), 200)


def where(scenario: Scenario) -> tuple[Spec, int]:
    """The time of every schedule as ideal plus losses, the fastest on top, and the height.

    The axis ends a little after serial. Longer bars are cut off, with their time at the edge.
    """
    found = {outcome.schedule: outcome for outcome in scenario.outcomes}
    if scenario.auto is not None:  # it may choose a schedule that is not among the usual ones
        found.setdefault(scenario.auto.outcome.schedule, scenario.auto.outcome)
    outcomes = sorted(found.values(), key=lambda outcome: outcome.seconds)
    rows = list(range(len(outcomes)))
    names = [escape(outcome.schedule.name) for outcome in outcomes]
    chosen = None if scenario.auto is None else scenario.auto.outcome.schedule
    labels = [
        f"<b>auto</b> · {name}" if outcome.schedule == chosen else name
        for name, outcome in zip(names, outcomes, strict=True)
    ]
    parts = [_parts(outcome) for outcome in outcomes]
    # Negative losses (waits that ideal has, too, or parts faster than the whole) shorten the ideal
    # part of a bar, so that the bar still ends at the time of its schedule.
    reached = [scenario.ideal + sum(min(0.0, loss) for loss in part.values()) for part in parts]
    data = [_stack("ideal", IDEAL_COLOUR, rows, [0.0] * len(rows), reached, names, reached)]
    for key, name, colour in LOSSES:
        lost = [part[key] for part in parts]
        lengths = [max(0.0, loss) for loss in lost]
        data.append(_stack(name, colour, rows, reached, lengths, names, lost))
        reached = [at + length for at, length in zip(reached, lengths, strict=True)]
    edge = axis_end(scenario)
    return {
        "data": data,
        "layout": {
            "barmode": "overlay",
            "margin": {"l": 8, "r": 72, "t": 24, "b": 40},
            "showlegend": False,
            "dragmode": False,
            "xaxis": {
                "title": {"text": "ms", "standoff": 4},
                "range": [0, 1e3 * edge],
                "fixedrange": True,
                "zeroline": False,
            },
            "yaxis": {**_categories(labels), "range": [len(rows) - 0.5, -0.5]},
            "shapes": [
                mark(1e3 * seconds, IDEAL_COLOUR) for seconds in (scenario.serial, scenario.ideal)
            ],
            "annotations": [
                _note("serial", scenario.serial, "left"),
                _note("ideal", scenario.ideal, "right"),
                *(_time(row, outcome.seconds, edge) for row, outcome in enumerate(outcomes)),
            ],
        },
    }, 24 * len(rows) + 90


def axis_end(scenario: Scenario) -> float:
    """The end of time axes in seconds. A few very slow schedules should not shrink all others."""
    longest = max((outcome.seconds for outcome in scenario.outcomes), default=0.0)
    return 1.05 * min(max(longest, scenario.serial), 1.15 * scenario.serial)


def known(scenario: Scenario, name: str) -> ScheduleOutcome | None:
    """The outcome of a schedule, or None if it was not explored or does not fit."""
    return next((o for o in scenario.outcomes if o.schedule.name == name), None)


def _parts(outcome: ScheduleOutcome) -> dict[str, float]:
    lost = {key: float(getattr(outcome.losses, key)) for key, _, _ in LOSSES}
    return {**lost, "hidden": outcome.losses.hidden}


def _speedup(scenario: Scenario, schedule: Schedule) -> float | None:
    outcome = known(scenario, schedule.name)
    return None if outcome is None else outcome.speedup


def _cell(number: int, scenario: Scenario, schedule: Schedule) -> list[Any]:
    """The choice of a click, and the text of a hover."""
    head = f"<b>{escape(schedule.name)}</b> in {escape(scenario.shape.label)}"
    outcome = known(scenario, schedule.name)
    if outcome is None:
        reason = dict(scenario.refused).get(schedule, "not explored")
        return [number, schedule.name, f"{head}<br>{escape(reason)}"]
    lines = [
        head,
        f"{duration(outcome.seconds)}: {outcome.speedup:.2f}x, "
        f"{outcome.percent_of_ideal:.0f} % of the possible gain",
    ]
    lost = _parts(outcome)
    for key, name in (*((key, name) for key, name, _ in LOSSES), ("hidden", "hidden")):
        if abs(lost[key]) >= 0.001 * scenario.ideal:
            lines.append(f"{name} {duration(lost[key])}")
    return [number, schedule.name, "<br>".join(lines)]


def _stack(
    name: str,
    colour: str,
    rows: list[int],
    bases: list[float],
    lengths: list[float],
    names: list[str],
    said: list[float],
) -> Spec:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": rows,
        "x": [round(1e3 * length, 6) for length in lengths],
        "base": [round(1e3 * base, 6) for base in bases],
        "width": 0.7,
        "marker": {"color": colour, "opacity": 0.5 if name == "ideal" else 1.0},
        "customdata": [
            [label, duration(seconds)] for label, seconds in zip(names, said, strict=True)
        ],
        "hovertemplate": f"<b>%{{customdata[0]}}</b><br>{name} %{{customdata[1]}}<extra></extra>",
    }


def _angle(labels: Sequence[str]) -> int:
    """The angle of labels. Long names of scenarios are slanted."""
    return 0 if max(map(len, labels), default=0) <= 4 else -50


def _slanted(labels: Sequence[str]) -> int:
    """The pixels below an axis that slanted labels need."""
    return round(4.6 * max(map(len, labels), default=0)) if _angle(labels) else 0


def _with_layer(scenario: Scenario) -> str:
    """The label of a scenario, and the layer that its note names, without what is in brackets."""
    layer = scenario.shape.note.split(" (")[0]
    return escape(f"{scenario.shape.label} {layer}" if layer else scenario.shape.label)


def _categories(labels: Sequence[str], **more: Any) -> Spec:
    return {
        "tickvals": list(range(len(labels))),
        "ticktext": list(labels),
        "fixedrange": True,
        "showgrid": False,
        "zeroline": False,
        **more,
    }


def _time(row: int, seconds: float, edge: float) -> Spec:
    """The time of a schedule. An arrow says that the bar ends outside."""
    return beside(row, f"{'▸' if seconds > edge else ''} {duration(seconds)}")


def _note(name: str, seconds: float, anchor: str) -> Spec:
    return {
        "xanchor": anchor,
        "x": 1e3 * seconds,
        "y": 1,
        "yref": "paper",
        "yanchor": "bottom",
        "showarrow": False,
        "text": name,
        "font": {"size": 11},
    }
