"""The page of `weft explore --workload`: the scaling of a step over nodes, plain and fused."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from math import ceil, floor, log10
from pathlib import Path

from weft.report import cells
from weft.report.figures import Spec
from weft.report.page import Page
from weft.report.units import duration
from weft.study.scaling import SCALINGS, Point, Scaling

HEADERS = (
    *("nodes", "devices", "plain\nms", "fused\nms", "saves", "slices"),
    *("exposed\nplain", "exposed\nfused", "effic.\nplain", "effic.\nfused"),
)
EFFICIENCY = (
    "Efficiency is the work per device and second, relative to the fused step on the fewest nodes; "
    "it can be a little above 100 %, where work of another size per device runs better."
)
PLAIN, FUSED, IDEAL = "#d55e00", "#0072b2", "#8a9bab"
COMPUTING, WAITING, EXPOSED = "#8a9bab", "#c9d0d6", "#e69f00"


def nodes_text(count: int) -> str:
    """`1 node`, `16 nodes`."""
    return f"{count} node" if count == 1 else f"{count} nodes"


def rows_of(points: Sequence[Point]) -> list[list[cells.Cell]]:
    """One row per number of nodes, under `HEADERS`. Times are in milliseconds."""
    return [
        [
            point.nodes,
            point.world,
            1e3 * point.plain.seconds,
            1e3 * point.fused.seconds,
            f"{100 * point.saving:z.1f} %",
            "plain" if point.chunks is None else str(point.chunks),
            1e3 * max(0.0, point.exposed(False)),
            1e3 * max(0.0, point.exposed(True)),
            f"{100 * efficiency(points, point, False):.0f} %",
            f"{100 * efficiency(points, point, True):.0f} %",
        ]
        for point in points
    ]


def efficiency(points: Sequence[Point], point: Point, fused: bool) -> float:
    """The work per device and second, relative to the fused step on the fewest nodes."""
    first = points[0]
    seconds = point.fused.seconds if fused else point.plain.seconds
    return first.fused.seconds / seconds * point.size / first.size


def batch_of(result: Scaling) -> str:
    """What the shared batch of strong scaling is sized for, in one sentence."""
    last = result.of("strong")[-1]
    workload, cluster = result.workload, result.cluster.with_nodes(last.nodes)
    more = last.size / workload.module.size_of(workload.config, cluster, "weak")
    if abs(more - 1.0) < 0.01:
        return f"On {nodes_text(last.nodes)}, a device has as much work as in weak scaling."
    than = f"{more:.3g} times the work" if more > 1 else f"{100 * more:.3g} % of the work"
    return (
        f"The whole batch is that of {workload.path.name}, however many nodes are asked for: on "
        f"{nodes_text(last.nodes)}, a device has {than} of weak scaling."
    )


def summary_of(result: Scaling) -> str:
    """The result in one or two sentences."""
    parts = []
    for scaling in SCALINGS:
        points = result.of(scaling)
        if points:
            last, top = points[-1], max(points, key=lambda point: point.saving)
            parts.append(
                f"{scaling} scaling: {100 * last.saving:.1f} % on {nodes_text(last.nodes)} "
                f"({duration(last.plain.seconds)} to {duration(last.fused.seconds)}), "
                f"at most {100 * top.saving:.1f} % on {top.nodes}"
            )
    title = result.workload.config.title
    return f"{title} on {result.cluster.title}. Fusing saves, {'; '.join(parts)}."


def write_scaling_page(path: str | os.PathLike[str], result: Scaling) -> Path:
    """Writes the page atomically."""
    page = Page(f"{result.workload.name} on many nodes, simulated", summary_of(result))
    facts = {}
    for scaling in SCALINGS:
        points = result.of(scaling)
        for last in points[-1:]:
            where = f"{scaling}, {nodes_text(last.nodes)}"
            kept = (100 * efficiency(points, last, fused) for fused in (False, True))
            facts[f"{where}: efficiency, plain → fused"] = " → ".join(f"{e:.0f} %" for e in kept)
            exposed = (duration(max(0.0, last.exposed(fused))) for fused in (False, True))
            facts[f"{where}: exposed communication"] = " → ".join(exposed)
    page.facts(facts)
    for scaling in SCALINGS:
        if points := result.of(scaling):
            _section(page, scaling, points, batch_of(result) if scaling == "strong" else "")
    last = result.points[len(result.of(result.points[0].scaling)) - 1]
    page.section(
        f"A step on {nodes_text(last.nodes)}",
        f"{last.scaling} scaling, {last.description}. All devices do the same; rank 0 is shown. "
        "Lanes are the compute units, the links inside the node and the network.",
    )
    page.timelines(result.timelines(last))
    page.section(
        "All numbers",
        f"Milliseconds; exposed is communication with idle compute units. {EFFICIENCY}",
    )
    for scaling in SCALINGS:
        if points := result.of(scaling):
            page.table(
                [header.replace("\n", " ") for header in HEADERS],
                rows_of(points),
                caption=f"{scaling} scaling",
            )
    page.section(
        "Assumptions", f"From {result.workload.path.name}; a file of your own takes its place."
    )
    page.table(["key", "value", "why"], assumptions(result.workload.path))
    return page.write(path)


def assumptions(path: Path) -> list[list[cells.Cell]]:
    """The keys, values and comments of a TOML file, and its comment lines."""
    rows: list[list[cells.Cell]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            rows.append(["", "", line.lstrip("# ")])
        elif match := re.match(r"(\w+) = (.*?)(?:\s+# (.*))?$", line):
            value = match[2] if len(match[2]) < 60 else match[2][:57] + "..."
            rows.append([match[1], value, match[3] or ""])
    return rows


def _section(page: Page, scaling: str, points: Sequence[Point], batch: str) -> None:
    text = (
        f"The batch is shared: {points[0].description} on {nodes_text(points[0].nodes)}, "
        f"{points[-1].description} on {points[-1].nodes}. Ideal: twice the nodes halve the time of "
        f"the fused step on the fewest. {batch}"
        if scaling == "strong"
        else f"Every device has the same work: {points[-1].description}. Ideal: the time of "
        "the fused step on the fewest nodes."
    )
    page.section(f"{scaling.capitalize()} scaling", text)
    page.legend({"plain": PLAIN, "fused": FUSED, "ideal": IDEAL})
    page.figure(_times(scaling, points), height=340)
    page.text("Where the time goes, plain on the left and fused on the right of each pair:")
    page.legend(
        {"computing": COMPUTING, "exposed communication": EXPOSED, "waiting otherwise": WAITING}
    )
    page.figure(_where(points), height=300, min_width=90 + 52 * len(points))


def _times(scaling: str, points: Sequence[Point]) -> Spec:
    nodes = [point.nodes for point in points]
    first = points[0]
    ideal = [
        1e3 * first.fused.seconds * (first.nodes / n if scaling == "strong" else 1.0) for n in nodes
    ]
    arms = (
        ("plain", PLAIN, [1e3 * point.plain.seconds for point in points]),
        ("fused", FUSED, [1e3 * point.fused.seconds for point in points]),
    )
    hover = [f"saves {100 * point.saving:.1f} %" for point in points]
    data: list[Spec] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "x": nodes,
            "y": times,
            "line": {"color": colour, "width": 2.5},
            "marker": {"size": 8, "color": colour},
            "customdata": hover,
            "hovertemplate": f"{name} <b>%{{y:.4~g}} ms</b>, %{{customdata}}<extra></extra>",
        }
        for name, colour, times in arms
    ]
    data.append(
        {
            "type": "scatter",
            "mode": "lines",
            "x": nodes,
            "y": ideal,
            "line": {"color": IDEAL, "width": 1.5, "dash": "dot"},
            "hovertemplate": "ideal %{y:.4~g} ms<extra></extra>",
        }
    )
    axis: Spec = {"title": {"text": "ms per step"}, "fixedrange": True}
    if scaling == "strong":
        marks = _log_ticks([y for one in data for y in one["y"]])
        axis |= {"type": "log", "tickvals": marks, "ticktext": [f"{mark:,g}" for mark in marks]}
    else:
        axis |= {"rangemode": "tozero"}
    return {
        "data": data,
        "layout": {
            "showlegend": False,
            "dragmode": False,
            "hovermode": "x unified",
            "margin": {"l": 8, "r": 14, "t": 14, "b": 44},
            "xaxis": {
                "type": "log",
                "title": {"text": "nodes"},
                "tickvals": nodes,
                "ticktext": [str(n) for n in nodes],
                "fixedrange": True,
            },
            "yaxis": axis,
        },
    }


def _log_ticks(values: Sequence[float]) -> list[float]:
    """1, 2 and 5 times powers of ten, from just below the least value to just above the most."""
    least, most = min(values), max(values)
    powers = range(floor(log10(least)) - 1, ceil(log10(most)) + 1)
    ticks = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    return [tick for tick in ticks if least / 1.5 <= tick <= most * 1.5]


def _where(points: Sequence[Point]) -> Spec:
    """Bars of compute, exposed communication and other waits, as shares of the plain step."""
    labels = [str(point.nodes) for point in points]
    data: list[Spec] = []
    for fused in (False, True):
        arm = "fused" if fused else "plain"
        base = [0.0] * len(points)
        for name, colour in (
            ("computing", COMPUTING),
            ("exposed communication", EXPOSED),
            ("waiting otherwise", WAITING),
        ):
            values = [_share(point, fused, name) for point in points]
            data.append(
                {
                    "type": "bar",
                    "x": labels,
                    "y": [round(value, 3) for value in values],
                    "base": [round(value, 3) for value in base],
                    "offset": 0.02 if fused else -0.38,
                    "width": 0.36,
                    "marker": {"color": colour, "opacity": 1.0 if fused else 0.75},
                    "hovertemplate": f"{arm}, {name} %{{y:.1f}} % of the plain step<extra></extra>",
                }
            )
            base = [at + value for at, value in zip(base, values, strict=True)]
    return {
        "data": data,
        "layout": {
            "barmode": "overlay",
            "showlegend": False,
            "dragmode": False,
            "margin": {"l": 8, "r": 14, "t": 14, "b": 44},
            "xaxis": {"type": "category", "title": {"text": "nodes"}, "fixedrange": True},
            "yaxis": {
                "title": {"text": "of the plain step"},
                "ticksuffix": " %",
                "rangemode": "tozero",
                "fixedrange": True,
            },
        },
    }


def _share(point: Point, fused: bool, name: str) -> float:
    whole = point.plain.seconds
    computing = point.compute(fused)
    exposed = max(0.0, point.exposed(fused))
    if name == "computing":
        return 100.0 * computing / whole
    if name == "exposed communication":
        return 100.0 * exposed / whole
    total = point.fused.seconds if fused else whole
    return max(0.0, 100.0 * (total - computing - exposed) / whole)
