"""`weft explore --collective` on one node: every way to carry it out, by size, and the fastest."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.cli.asked import sizes_of
from weft.cli.console import console, print_json, progress, say_written
from weft.errors import Unsupported
from weft.files import check_targets
from weft.machine import Cluster, load_cluster
from weft.operation import ranks_label
from weft.plan.collective import UNROOTED, find_kind
from weft.report.cells import Cell
from weft.report.collective_page import write_collective_page
from weft.report.collective_report import refused_of, tables_of, verdict, why
from weft.report.perfetto import write_trace
from weft.report.terminal_table import table
from weft.report.units import byte_size, duration
from weft.simulate import run
from weft.simulate.cluster import ask, bound
from weft.study.collective_comparison import Comparison, compare
from weft.study.collective_ways import CollectiveWay, ways, world_of
from weft.timeline import Timeline

SIZES = "64KiB,1MiB,16MiB,1GiB"
"""The sizes to ask about if none is given."""


def node_of(machine: str, nodes: str | None, algorithm: str, chunks: int | None) -> Cluster | None:
    """The one node that a question is about, or None if it is about a cluster: one of several
    nodes, one without a machine, or an algorithm between nodes."""
    if nodes is not None or chunks is not None or (algorithm != "auto" and not way_of(algorithm)):
        return None
    cluster = load_cluster(machine)
    own_file = Path(machine).suffix == ".toml"
    if cluster.machine is None or (own_file and cluster.nodes > 1):
        return None
    return cluster.with_nodes(1)


def way_of(algorithm: str) -> CollectiveWay | None:
    """The way that `--algorithm` names, if it is one of a node and not one of links."""
    named = [way for way in ways() if way.name == algorithm and way.by != "links"]
    return named[0] if named else None


def explore_ways(
    place: Cluster,
    kind: str,
    size: str | None,
    algorithm: str,
    json: bool,
    html: Path | None,
    trace: Path | None,
) -> None:
    """How long a collective takes on one node, in every way, and which is the fastest."""
    if find_kind(kind).gives == "nothing":
        raise Unsupported(f"a {kind} moves no bytes; ask about {', '.join(UNROOTED)}")
    sizes = sizes_of(size or SIZES)
    check_targets(html, trace)
    world = world_of(place, len(os.sched_getaffinity(0)))
    with progress(f"comparing ways on {place.name}", quiet=json) as report:
        found = compare(place, kind, sizes, world, way_of(algorithm), report)
    if trace is not None:
        write_trace(trace, _timelines(found))
    if html is not None:
        _write_page(html, found)
    if json:
        print_json(_json(found))
        return
    caption = (
        f"{kind} on one node: {place.title}. Sizes are of the gathered result, a rank's input of a "
        "reduce-scatter or all-to-all, or the vector that is added or passed on. Times by engines "
        "and links are simulated, by cores in closed form, by the host measured. * marks the "
        "fastest. Links alone, with an estimated start, are shown but not chosen."
    )
    pages = list(tables_of(found))
    for number, (headers, rows) in enumerate(pages):
        last = number == len(pages) - 1
        console.print(table(headers, rows, caption=caption if last else None, width=console.width))
    for index in range(len(found.collectives)):
        console.print(why(found, index))
    if found.refused:
        console.print("Left out:")
        for line in refused_of(found):
            console.print(f"  {line}")
    say_written(html, trace)
    console.print(verdict(found))


def _write_page(path: Path, found: Comparison) -> None:
    sizes = [float(one.total_bytes) for one in found.collectives]
    curves = {
        times.way.name: [(s, t) for s, t in zip(sizes, times.seconds, strict=True) if s and t]
        for times in found.found
    }
    rows: list[list[Cell]] = [
        [times.way.name, times.way.by, *map(duration, times.seconds)] for times in found.found
    ]
    indices = range(len(found.collectives))
    write_collective_page(
        path,
        f"{found.kind} on {ranks_label(found.world)} of {found.place.name}",
        verdict(found),
        {"Time by size": curves},
        ("way", "by", *map(byte_size, sizes)),
        rows,
        [*(why(found, index) for index in indices), *refused_of(found)],
    )


def _timelines(found: Comparison) -> list[Timeline]:
    """Rank 0 of every way that has a plan, at every size."""
    timelines = []
    for collective in found.collectives:
        for times in found.found:
            plan = times.way.plan(collective, found.place)
            if plan is not None:
                title = f"{byte_size(collective.total_bytes)} {times.way.name}"
                timeline = run(plan, found.place.device).timeline().of(0)
                timelines.append(replace(timeline, title=title))
    if not timelines:
        raise Unsupported("none of these ways has a plan to trace; leave out --trace")
    return timelines


def _json(found: Comparison) -> dict[str, Any]:
    """The keys of a cluster's answers, and what every way takes beside them."""
    answers = []
    modelled = found.kind in UNROOTED and found.place.device.host is None
    for index, collective in enumerate(found.collectives):
        total = float(collective.total_bytes)
        least, slowest = bound(found.place, found.kind, total) if modelled else (None, None)
        algorithms = ask(found.place, found.kind, total) if modelled else []
        answers.append(
            {
                "nodes": 1,
                "devices": found.world,
                "size": total,
                "bound_us": None if least is None else 1e6 * least,
                "slowest": slowest,
                "algorithms": [answer.to_json() for answer in algorithms],
                **found.to_json(index),
                "why": why(found, index),
            }
        )
    return {
        "collective": found.kind,
        "cluster": found.place.name,
        "answers": answers,
        "verdict": verdict(found),
    }
