"""`weft explore` on clusters: collectives by algorithm, schedules of an operation over several
nodes, and the scaling of training steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.cli.asked import sizes_of
from weft.cli.console import console, print_json, progress, say_written
from weft.errors import Unsupported
from weft.files import check_targets
from weft.machine import Cluster, load_cluster
from weft.models.workloads import load_workload
from weft.report.cells import Cell
from weft.report.collective_page import write_collective_page
from weft.report.perfetto import write_trace
from weft.report.run_report import SHARE
from weft.report.scaling_page import (
    EFFICIENCY,
    HEADERS,
    batch_of,
    nodes_text,
    rows_of,
    summary_of,
    write_scaling_page,
)
from weft.report.terminal_table import table
from weft.report.units import byte_size, duration, share
from weft.schedule import Schedule
from weft.simulate.cluster import CollectiveAnswer, ask
from weft.study.cluster_plans import explore_plans
from weft.study.scaling import SCALINGS, Scaling, scale
from weft.study.scenarios import Shape


def nodes_of(text: str | None, cluster: Cluster) -> list[int]:
    """Parses `1..128` (doubling from the first to the last) or `1,3,5` (exactly these)."""
    if text is None:
        return [cluster.nodes]
    found: list[int] = []
    for part in text.split(","):
        first, dots, last = part.strip().partition("..")
        try:
            low, high = int(first), int(last if dots else first)
        except ValueError as error:
            raise Unsupported(
                f"{part.strip()!r} is not a number of nodes; write e.g. 16, 1,2,4 or 1..128"
            ) from error
        if not 1 <= low <= high:
            raise Unsupported(f"{part.strip()!r} is not a range of nodes from 1 on")
        count = low
        while count < high:
            found.append(count)
            count *= 2
        found.append(high)
    return sorted(set(found))


def explore_collective(
    machine: str,
    kind: str,
    size: str,
    algorithm: str,
    chunks: int | None,
    nodes: str | None,
    json: bool,
    html: Path | None,
    trace: Path | None,
) -> None:
    """The time of a collective over all devices per algorithm, and its lower bound."""
    cluster = load_cluster(machine)
    asked = [(n, total) for n in nodes_of(nodes, cluster) for total in sizes_of(size)]
    check_targets(html, trace)
    answers: list[list[CollectiveAnswer]] = []
    with progress(f"simulating {machine}", quiet=json) as report:
        for number, (count, total) in enumerate(asked):
            report(number / len(asked), f"{kind} on {count} nodes")
            answers.append(ask(cluster.with_nodes(count), kind, total, algorithm, chunks))
    if trace is not None:
        told = [
            replace(one.timeline(), title=f"{one.cluster.nodes} nodes {one.algorithm}")
            for some in answers
            for one in some
        ]
        write_trace(trace, told)
    rows: list[list[Cell]] = []
    for some in answers:
        for answer in some:
            rows.append(
                [
                    answer.cluster.nodes,
                    answer.cluster.world,
                    byte_size(answer.total),
                    answer.algorithm,
                    answer.chunks,
                    duration(answer.seconds),
                    duration(answer.bound),
                    f"{answer.over_bound:.2f}x",
                    answer.bus_bandwidth / 1e9,
                ]
            )
    headers = (
        "nodes",
        "devices",
        "size",
        "algorithm",
        "chunks",
        "time",
        "bound",
        "x bound",
        "GB/s",
    )
    caption = (
        f"{kind} on {cluster.title}, simulated. Sizes are of the gathered result, a rank's input "
        "of a reduce-scatter or all-to-all, or the vector of an all-reduce. The bound is what the "
        "slowest link alone takes; GB/s are bus bandwidth, as nccl-tests counts it."
    )
    limits = dict.fromkeys(
        f"{some[0].slowest} ({nodes_text(some[0].cluster.nodes)})" for some in answers
    )
    bound = f"The bound is set by {', '.join(limits)}."
    if html is not None:
        write_collective_page(
            html,
            f"{kind} on {cluster.title}, simulated",
            _verdict(answers),
            _curves(answers),
            headers,
            rows,
            [caption, bound],
        )
    if json:
        said = {"answers": _json(answers), "verdict": _verdict(answers)}
        print_json({"collective": kind, "cluster": cluster.name, **said})
        return
    console.print(table(headers, rows, caption=caption, whole=(2, 3, 5, 6), drop=(4, 1, 6)))
    console.print(bound)
    say_written(html, trace)
    console.print(_verdict(answers))


def _curves(
    answers: list[list[CollectiveAnswer]],
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """For each number of nodes, the times of every algorithm by size."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for some in answers:
        ways = found.setdefault(f"Time by size on {nodes_text(some[0].cluster.nodes)}", {})
        for one in some:
            ways.setdefault(one.algorithm, []).append((one.total, one.seconds))
    return {
        place: {name: sorted(ways[name]) for name in sorted(ways)} for place, ways in found.items()
    }


def explore_shape(
    machine: str,
    op: str,
    shape: Shape,
    schedules: list[Schedule] | None,
    nodes: str,
    json: bool,
) -> None:
    """The schedules of an operation over all devices of a cluster."""
    cluster = load_cluster(machine)
    found = []
    with progress(f"simulating {machine}", quiet=json) as report:
        for count in nodes_of(nodes, cluster):
            found.append(explore_plans(cluster.with_nodes(count), op, shape, schedules, report))
    if json:
        print_json([one.to_json() for one in found])
        return
    for one in found:
        console.print(
            f"{one.operation.label}, {nodes_text(one.cluster.nodes)}\n"
            f"compute {one.compute * 1e3:.3f} ms, communication {one.communication * 1e3:.3f} ms, "
            f"serial {one.serial * 1e3:.3f} ms"
        )
        rows: list[list[Cell]] = [
            [name.name, 1e3 * seconds, f"{one.speedup(seconds):.2f}x", share(one.reached(seconds))]
            for name, seconds in one.outcomes
        ]
        best = min(range(len(rows)), key=lambda row: one.outcomes[row][1])
        headers = ("schedule", "ms", "gain", "share of gain")
        console.print(table(headers, rows, best=best, caption=SHARE))
        for schedule, reason in one.refused:
            console.print(f"{schedule} is left out: {reason}")
        name, seconds = one.outcomes[best]
        where = nodes_text(one.cluster.nodes)
        console.print(
            f"Use {name} on {where}: {one.speedup(seconds):.2f}x over serial."
            if one.speedup(seconds) > 1.01
            else f"Do not overlap this on {where}: no schedule is faster than serial."
        )


def explore_workload(
    machine: str,
    workload: str,
    model: str | None,
    nodes: str | None,
    scaling: str,
    json: bool,
    html: Path | None,
    trace: Path | None,
) -> None:
    """The scaling of a training step over nodes, plain and fused."""
    found = load_workload(workload, model)
    cluster = load_cluster(machine)
    if scaling not in (*SCALINGS, "both"):
        raise Unsupported(f"scaling is weak, strong or both, not {scaling!r}")
    check_targets(html, trace)
    counts = nodes_of(nodes, cluster) if nodes is not None else nodes_of("1..128", cluster)
    wanted = SCALINGS if scaling == "both" else (scaling,)
    with progress(f"simulating {workload} on {machine}", quiet=json) as report:
        result = scale(found, cluster, counts, wanted, report)
        if html is not None:
            write_scaling_page(html, result)
        if trace is not None:
            last = result.points[len(counts) - 1]
            write_trace(trace, result.timelines(last))
    if json:
        print_json(result.to_json())
        return
    show_scaling(result)
    say_written(html, trace)
    console.print(summary_of(result))


def show_scaling(result: Scaling) -> None:
    """Prints one table for weak scaling and one for strong scaling."""
    for scaling in SCALINGS:
        points = result.of(scaling)
        if points:
            title = f"{scaling} scaling: {points[-1].description}"
            if scaling == "strong":
                title += f" on {nodes_text(points[-1].nodes)}"
            said = EFFICIENCY if scaling != "strong" else f"{batch_of(result)} {EFFICIENCY}"
            drawn = table(HEADERS, rows_of(points), title=title, caption=said, width=console.width)
            console.print(drawn)
    console.print(f"Sizes and every assumption: {result.workload.path}", soft_wrap=True)


def _verdict(answers: list[list[CollectiveAnswer]]) -> str:
    """The fastest algorithm on the most nodes, at the largest size there."""
    best = answers[-1][0]
    return (
        f"Fastest for {byte_size(best.total)} on {nodes_text(best.cluster.nodes)}: "
        f"{best.algorithm}, {duration(best.seconds)}, {best.over_bound:.2f}x the bound."
    )


def _json(answers: list[list[CollectiveAnswer]]) -> list[dict[str, Any]]:
    return [
        {
            "nodes": some[0].cluster.nodes,
            "devices": some[0].cluster.world,
            "size": some[0].total,
            "bound_us": 1e6 * some[0].bound,
            "slowest": some[0].slowest,
            "algorithms": [answer.to_json() for answer in some],
        }
        for some in answers
    ]
