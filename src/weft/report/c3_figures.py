"""Figures of a C3 study: share of the possible gain, slowdowns, and the effect of units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.report.explore_figures import EDGE, EQUAL, FASTER, IDEAL_COLOUR, ON_SHADES, SLOWER
from weft.report.figures import Spec, row_edges
from weft.report.units import duration, scaled
from weft.study.c3.cases import KINDS
from weft.study.c3.findings import C3Scenario, Study

KIND_COLOURS = {"G-long": "#56b4e9", "GC-equal": "#0072b2", "C-long": "#7d5ba6"}
PUBLISHED_COLOUR = "#d55e00"
SIDE_COLOURS = {"GEMM": "#0072b2", "collective": "#e69f00"}
UNIT_COLOURS = {
    "compute-bound GEMMs": "#0072b2",
    "memory-bound GEMMs": "#56b4e9",
    "all_gather": "#e69f00",
    "all_to_all": "#d55e00",
}
_BARS = "#8a9bab"
_DOTTED = {"width": 1.5, "dash": "dot", "color": IDEAL_COLOUR}


def two_lines(name: str) -> str:
    """The name of a strategy in two lines, for the ticks of an axis."""
    return name.replace("+", "+<br>")


def ladder(study: Study) -> Spec:
    """Share of the possible gain per strategy, from top to bottom: a bar for the mean, with its
    value beside the name, where no dot covers it; a dot for each kind of scenario, and a stroke for
    the published value of the real machine."""
    means = study.means()
    rows = list(range(len(means)))
    data: list[Spec] = [
        {
            "type": "bar",
            "orientation": "h",
            "y": rows,
            "x": [round(mean.percent_of_ideal, 2) for mean in means],
            "width": 0.62,
            "marker": {"color": _BARS},
            "hovertemplate": "mean <b>%{x:.1f} %</b><extra></extra>",
        }
    ]
    for kind in KINDS:
        if any(kind in mean.by_kind for mean in means):
            found = [mean.by_kind.get(kind) for mean in means]
            marker = {"color": KIND_COLOURS[kind], "size": 9}
            data.append(_marks(rows, found, kind, marker))
    if study.published:
        found = [study.published.get(mean.name) for mean in means]
        stroke = {"width": 3, "color": PUBLISHED_COLOUR}
        marker = {"symbol": "line-ns", "size": 24, "line": stroke}
        data.append(_marks(rows, found, "measured, published", marker))
    return {
        "data": data,
        "layout": {
            **_plain(),
            "hovermode": "closest",
            "xaxis": {"title": {"text": "share of the possible gain, %"}, "fixedrange": True},
            "yaxis": _names([f"{m.name}  <b>{m.percent_of_ideal:.0f} %</b>" for m in means]),
            "shapes": [_upright(100.0)],
        },
    }


def sides(study: Study) -> Spec:
    """The mean slowdown of the GEMM and of the collective under each strategy."""
    means = study.means()
    rows = list(range(len(means)))
    values = {
        "GEMM": [mean.gemm_slowdown for mean in means],
        "collective": [mean.collective_slowdown for mean in means],
    }
    return {
        "data": [
            {
                "type": "bar",
                "orientation": "h",
                "y": rows,
                "x": [round(value, 4) for value in found],
                "marker": {"color": SIDE_COLOURS[side]},
                "hovertemplate": f"{side} <b>%{{x:.2f}}x</b><extra></extra>",
            }
            for side, found in values.items()
        ],
        "layout": {
            **_plain(),
            "barmode": "group",
            "bargap": 0.3,
            "hovermode": "closest",
            "xaxis": {
                "title": {"text": "times as long as alone"},
                "ticksuffix": "x",
                "rangemode": "tozero",
                "fixedrange": True,
            },
            "yaxis": _names([mean.name for mean in means]),
            "shapes": [_upright(1.0)],
        },
    }


def heat_map(study: Study) -> tuple[Spec, int]:
    """Share of the possible gain of every strategy in every scenario, and the height. Scenarios are
    rows, grouped by kind."""
    names = [mean.name for mean in study.means()]
    scenarios = sorted(study.scenarios, key=lambda scenario: KINDS.index(scenario.kind))
    percents = [[_percent(scenario, name) for name in names] for scenario in scenarios]
    shades = [[None if p is None else min(100.0, max(0.0, p)) for p in row] for row in percents]
    labels = [f"{scenario.case.label}" for scenario in scenarios]
    return {
        "data": [
            {
                "type": "heatmap",
                "x": list(range(len(names))),
                "y": list(range(len(scenarios))),
                "z": shades,
                "zmin": 0,
                "zmax": 100,
                "colorscale": [[0, SLOWER], [0.5, EQUAL], [1, FASTER]],
                "showscale": False,
                "text": [["" if p is None else f"{p:z.0f}" for p in row] for row in percents],
                "texttemplate": "%{text}",
                "textfont": {"size": 11, "color": ON_SHADES},
                "customdata": [[_said(scenario, name) for name in names] for scenario in scenarios],
                "hovertemplate": "%{customdata}<extra></extra>",
            }
        ],
        "layout": {
            "margin": {"l": 8, "r": 8, "t": 44, "b": 10},
            "dragmode": False,
            "xaxis": {
                "side": "top",
                "tickvals": list(range(len(names))),
                "ticktext": [two_lines(name) for name in names],
                "fixedrange": True,
                "showgrid": False,
            },
            "yaxis": {
                "tickvals": list(range(len(scenarios))),
                "ticktext": labels,
                "range": [len(scenarios) - 0.5, -0.5],
                "fixedrange": True,
                "showgrid": False,
            },
            "shapes": row_edges([scenario.kind for scenario in scenarios], EDGE),
        },
    }, 20 * len(scenarios) + 90


def units(study: Study) -> Spec:
    """The effect of units: GEMMs by the number taken away, collectives by the number they have."""
    sweep = study.units
    assert sweep is not None
    lines: dict[str, tuple[Sequence[int], Sequence[float]]] = {
        f"{bound}-bound GEMMs": (sweep.taken, values) for bound, values in sweep.gemms.items()
    }
    return _lines(lines, "compute units taken from the GEMM")


def given(study: Study) -> Spec:
    """The slowdown of a collective with few units, relative to all that it can use."""
    sweep = study.units
    assert sweep is not None
    lines: dict[str, tuple[Sequence[int], Sequence[float]]] = {
        kind: (sweep.given, values) for kind, values in sweep.collectives.items()
    }
    spec = _lines(lines, "compute units given to the collective")
    spec["layout"]["xaxis"]["type"] = "log"
    spec["layout"]["xaxis"]["tickvals"] = list(sweep.given)
    return spec


def partitions(study: Study) -> Spec:
    """Share of the possible gain by the number of reserved units, one line per scenario."""
    data: list[Spec] = []
    for scenario in study.scenarios:
        outcomes = scenario.sweeps["partitioned"]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "x": [outcome.strategy.reserved for outcome in outcomes],
                "y": [round(outcome.percent_of_ideal, 2) for outcome in outcomes],
                "line": {"color": KIND_COLOURS[scenario.kind], "width": 1.5},
                "marker": {"size": 5},
                "opacity": 0.8,
                "customdata": [scenario.case.label] * len(outcomes),
                "hovertemplate": "%{customdata}, %{x} compute units: <b>%{y:.0f} %</b>"
                "<extra></extra>",
            }
        )
    sizes = sorted({x for one in data for x in one["x"]})
    return {
        "data": data,
        "layout": {
            **_plain(),
            "hovermode": "closest",
            "xaxis": {
                "type": "log",
                "title": {"text": "compute units reserved for the collective"},
                "tickvals": sizes,
                "ticktext": [str(size) for size in sizes],
                "fixedrange": True,
            },
            "yaxis": {
                "title": {"text": "share of the possible gain, %"},
                "range": [-105, 110],
                "fixedrange": True,
            },
            "shapes": [_level(100.0), _level(0.0)],
        },
    }


def _lines(lines: Mapping[str, tuple[Sequence[int], Sequence[float]]], label: str) -> Spec:
    return {
        "data": [
            {
                "type": "scatter",
                "mode": "lines+markers",
                "x": list(x),
                "y": [round(value, 4) for value in y],
                "line": {"color": UNIT_COLOURS[name], "width": 2},
                "marker": {"size": 7},
                "hovertemplate": f"{name}, %{{x}} compute units: <b>%{{y:.2f}}x</b><extra></extra>",
            }
            for name, (x, y) in lines.items()
        ],
        "layout": {
            **_plain(),
            "hovermode": "closest",
            "xaxis": {"title": {"text": label}, "fixedrange": True},
            "yaxis": {"title": {"text": "times as long"}, "ticksuffix": "x", "fixedrange": True},
            "shapes": [_level(1.0)],
        },
    }


def _plain() -> Spec:
    margin = {"l": 8, "r": 14, "t": 14, "b": 44}
    return {"showlegend": False, "dragmode": False, "margin": margin}


def _names(names: Sequence[str]) -> Spec:
    """An axis of strategies, with the first on top."""
    return {
        "tickvals": list(range(len(names))),
        "ticktext": [two_lines(name) for name in names],
        "range": [len(names) - 0.5, -0.5],
        "fixedrange": True,
        "showgrid": False,
    }


def _marks(rows: Sequence[int], x: Sequence[float | None], name: str, marker: Spec) -> Spec:
    return {
        "type": "scatter",
        "mode": "markers",
        "y": list(rows),
        "x": list(x),
        "marker": marker,
        "hovertemplate": f"{name} <b>%{{x:.1f}} %</b><extra></extra>",
    }


def _upright(value: float) -> Spec:
    place = {"yref": "paper", "y0": 0, "y1": 1, "x0": value, "x1": value}
    return {"type": "line", **place, "line": _DOTTED}


def _level(value: float) -> Spec:
    place = {"xref": "paper", "x0": 0, "x1": 1, "y0": value, "y1": value}
    return {"type": "line", **place, "line": _DOTTED}


def _percent(scenario: C3Scenario, name: str) -> float | None:
    outcome = scenario.outcomes.get(name)
    return None if outcome is None else outcome.percent_of_ideal


def _said(scenario: C3Scenario, name: str) -> str:
    outcome = scenario.outcomes.get(name)
    case = scenario.case
    head = (
        f"<b>{case.label}</b>, {scenario.kind}, {scenario.bound}-bound<br>"
        f"{case.m} x {case.n} x {case.k} beside {case.collective} of {scaled(case.num_bytes, 'B')}"
        f"<br>alone {duration(scenario.compute)} and {duration(scenario.communication)}"
    )
    if outcome is None:
        return f"{head}<br>{name}: {scenario.refused.get(name, 'not tried')}"
    return (
        f"{head}<br>{outcome.strategy}: {duration(outcome.seconds)}, {outcome.speedup:.2f}x, "
        f"{outcome.percent_of_ideal:.0f} % of the possible gain<br>"
        f"GEMM {outcome.gemm_slowdown:.2f}x, "
        f"collective {outcome.collective_slowdown:.2f}x as long as alone"
    )
