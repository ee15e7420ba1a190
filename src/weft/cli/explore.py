"""`weft explore`: simulates the schedules of an operation on any machine."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.asked import machines_of
from weft.cli.console import (
    Json,
    PerRank,
    console,
    print_json,
    progress,
    say_written,
    total_columns,
    until_stopped,
)
from weft.cli.explore_ahead import ahead_json, show_ahead
from weft.cli.explore_cluster import explore_collective, explore_shape, explore_workload
from weft.cli.explore_layers import explore_layers, read_model
from weft.cli.explore_machines import show_both, to_json, verdict
from weft.cli.explore_table import show
from weft.cli.explore_ways import SIZES, explore_ways, node_of
from weft.dtype import MULTIPLIED
from weft.errors import Unsupported, nearest
from weft.files import check_targets
from weft.machine import Machine, all_names
from weft.models.workloads import WORKLOADS
from weft.operation import find
from weft.plan.collective import UNROOTED
from weft.report.explore_page import verdict_of, write_explore_page
from weft.report.perfetto import write_trace
from weft.schedule import Schedule
from weft.select.decision import AUTO
from weft.simulate.cluster import ALGORITHMS
from weft.study.exploration import Exploration, Scenario
from weft.study.exploration import explore as simulate
from weft.study.scenarios import Shape, ficco, from_csv
from weft.timeline import Timeline

SETS = {"ficco": ficco}
"""The scenarios that come with weft, by name."""


def register(app: typer.Typer) -> None:
    app.command()(explore)


def explore(
    machine: Annotated[
        str,
        typer.Option(
            help=f"One of {', '.join(all_names())}, cpu (this host, once calibrated), or the "
            "path of a TOML file; several, separated by commas, are laid side by side."
        ),
    ] = "mi300x",
    op: Annotated[str, typer.Option(help="The operation.")] = "all_gather_matmul",
    m: Annotated[int | None, typer.Option("--m", help="M: rows of A over all ranks.")] = None,
    n: Annotated[
        int | None,
        typer.Option("--n", help="N: columns of B over all ranks; each has N / world of them."),
    ] = None,
    n_per_rank: PerRank = None,
    k: Annotated[int | None, typer.Option("--k", help="K: columns of A, rows of B.")] = None,
    scenarios: Annotated[
        str | None,
        typer.Option(help=f"Scenarios that ship with weft instead of a shape: {', '.join(SETS)}."),
    ] = None,
    shapes: Annotated[
        Path | None,
        typer.Option(
            help="A CSV file with the columns m, n, k, and if wanted id, dtype, result, note."
        ),
    ] = None,
    layers: Annotated[
        Path | None,
        typer.Option(
            help="A whole model: a TOML file with its layers, or a Hugging Face config.json."
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="config.json: sequences in a step. [default: 1]")
    ] = None,
    sequence: Annotated[
        int | None, typer.Option(help="config.json: tokens of a sequence. [default: 8192]")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            help="config.json: tokens attended to, those before the sequence included (decoding: "
            "--sequence 1 --context 8192). [default: the sequence]"
        ),
    ] = None,
    parallelism: Annotated[
        str | None,
        typer.Option(
            help="config.json: sequence (tensor parallel, tokens gathered and scattered), tensor "
            "(all-reduce) or expert (only experts are shared). [default: sequence]"
        ),
    ] = None,
    step: Annotated[
        str | None,
        typer.Option(help="config.json: forward, or train (with backward). [default: forward]"),
    ] = None,
    world: Annotated[
        int | None,
        typer.Option(help="Number of ranks. [default: 8 or all, or as in the layers]"),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help=f"One of {', '.join(MULTIPLIED)}. [default: bfloat16]"),
    ] = None,
    result: Annotated[
        str | None, typer.Option(help="The dtype of the result. [default: that of --dtype]")
    ] = None,
    schedule: Annotated[
        str, typer.Option(help="all, or names separated by commas, e.g. auto,serial,adaptive@dma.")
    ] = "all",
    contention: Annotated[
        bool,
        typer.Option(
            "--contention/--no-contention",
            help="Whether kernels and bytes slow each other; without, speedups are upper bounds.",
        ),
    ] = True,
    captured: Annotated[
        bool,
        typer.Option("--captured", help="As if every plan were captured in a graph beforehand."),
    ] = False,
    planned: Annotated[
        bool,
        typer.Option("--planned", help="Also adaptive as decided ahead, as on a GPU."),
    ] = False,
    json: Json = False,
    html: Annotated[Path | None, typer.Option(help="Write a page to look into it.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Write a trace for Perfetto: of all ranks and schedules for one shape, else of "
            "rank 0 under serial, shard-p2p, adaptive and the best schedule."
        ),
    ] = None,
    collective: Annotated[
        str | None,
        typer.Option(
            help=f"Ask about a collective: {', '.join(UNROOTED)}; on one node also broadcast, "
            "gather and scatter."
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            help="Of the collective, e.g. 64KiB,256MiB. "
            f"[default: {SIZES} on one node, else 256MiB]"
        ),
    ] = None,
    algorithm: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(ALGORITHMS)}, or e.g. hierarchical:direct+ring; on one node also "
            "cores, or a variant of copy engines, e.g. b2b+prelaunch."
        ),
    ] = "auto",
    chunks: Annotated[
        int | None,
        typer.Option(help="Of hierarchical algorithms. [default: the best]", min=1, max=1024),
    ] = None,
    workload: Annotated[
        str | None, typer.Option(help=f"On a cluster, plain against fused: {', '.join(WORKLOADS)}.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Sizes of the workload, e.g. dlrm-mlperf, or a TOML file.")
    ] = None,
    nodes: Annotated[
        str | None, typer.Option(help="Of the cluster, e.g. 16 or 1,3,5 or 1..128 (doubling).")
    ] = None,
    scaling: Annotated[str, typer.Option(help="weak, strong or both.")] = "both",
) -> None:
    """Simulate how much overlap gives, under which schedule, and where the time goes.

    Sizes are those of the whole product over all ranks: A is M x K with M / world rows on each
    rank, B is K x N with N / world columns on each.

    With --layers, a step of a whole model: the time of each layer, and what overlap saves.

    With --collective and no --nodes, every way to carry it out on one node is compared. With
    --nodes or --workload, the machine is a cluster: nodes and the network between them, and all of
    its devices are ranks.
    """
    n = total_columns(n, n_per_rank, 8 if world is None else world)
    if layers is None:
        given = {"batch": batch, "sequence": sequence, "context": context}
        given |= {"parallelism": parallelism, "step": step}  # type: ignore[dict-item]
        for name, value in given.items():
            if value is not None:
                raise Unsupported(f"--{name} is for a model; say which one with --layers")
    else:
        if any(g is not None for g in (m, n, k, scenarios, shapes, collective, workload, nodes)):
            raise Unsupported("--layers says all sizes; leave out shapes, collectives and nodes")
        if html is not None or trace is not None:
            raise Unsupported("there is no page and no trace of a list of layers; use --json")
        whole = read_model(layers, world, dtype, batch, sequence, context, parallelism, step)
        on = [_as_asked(one, contention, captured) for one in machines_of(machine)]
        explore_layers(on, whole, _schedules(schedule)[0], json)
        return
    if collective is not None or workload is not None:
        if any(size is not None for size in (m, n, k, scenarios, shapes)) or (
            collective is not None and workload is not None
        ):
            raise Unsupported("ask about a shape, a --collective or a --workload, one at a time")
        if workload is not None:
            explore_workload(machine, workload, model, nodes, scaling, json, html, trace)
        else:
            kind, one_node = str(collective), node_of(machine, nodes, algorithm, chunks)
            if one_node is not None:
                explore_ways(one_node, kind, size, algorithm, json, html, trace)
                return
            explore_collective(
                machine, kind, size or "256MiB", algorithm, chunks, nodes, json, html, trace
            )
        return
    if nodes is not None and (captured or not contention):
        raise Unsupported("on several nodes, leave out --no-contention and --captured")
    described = [] if nodes is not None else machines_of(machine)
    described = [_as_asked(one, contention, captured) for one in described]
    if n_per_rank is not None and world is None and any(o.links.world < 8 for o in described):
        raise Unsupported("--n-per-rank needs --world where a machine has fewer than 8 ranks")
    asked = _shapes(m, n, k, scenarios, shapes, dtype, result)
    find(op)
    wanted, auto = _schedules(schedule)
    if nodes is not None:
        if auto and wanted is not None:
            raise Unsupported("on several nodes, name schedules; auto is not simulated there")
        if len(asked) > 1 or html is not None or trace is not None:
            raise Unsupported("on several nodes, ask about one shape, as a table or --json")
        explore_shape(machine, op, asked[0], wanted, nodes, json)
        return
    if len(described) > 1 and (html is not None or trace is not None):
        raise Unsupported("a page or a trace shows one machine; ask about each by itself")
    check_targets(html, trace)
    every: list[Exploration] = []
    for one in described:
        with progress(f"simulating {one.name}", quiet=json) as report:
            simulated = partial(
                simulate,
                one,
                op,
                asked,
                min(8, one.links.world) if world is None else world,
                wanted,
                auto=auto,
                progress=lambda done, of, label, report=report: report(done / of, label),  # type: ignore[misc]
            )
            found, stopping = until_stopped(
                simulated, lambda e: f"{len(e.scenarios)} of {len(asked)} shapes"
            )
            for scenario in found.scenarios:
                _check_any(scenario)
            if html is not None:
                write_explore_page(html, found, report)
            if trace is not None:
                write_trace(trace, _timelines(found))
        every.append(found)
        if stopping.said:
            break
    if json:
        said = to_json(every) if len(every) > 1 else every[0].to_json()
        if planned:
            said["planned"] = {each.machine.name: ahead_json(each) for each in every}
        print_json({"upper_bound": not contention, "captured": captured, **said, **stopping.json})
        stopping.end()
        return
    if len(every) > 1:
        show_both(every)
    else:
        show(every[0])
    for explored in every if planned else ():
        show_ahead(explored)
    say_written(html, trace)
    console.print(verdict(every) if len(every) > 1 else verdict_of(every[0]))
    stopping.end()


def _as_asked(machine: Machine, contention: bool, captured: bool) -> Machine:
    if machine.host is not None and (captured or not contention):
        raise Unsupported(
            f"{machine.name} is a host: it has no graphs to capture, and no contention to leave out"
        )
    machine = machine if contention else machine.without_contention()
    return machine.captured() if captured else machine


def _schedules(text: str) -> tuple[list[Schedule] | None, bool]:
    """The schedules of `--schedule`, None for all of them, and whether `auto` is among them."""
    names = [name.strip() for name in text.split(",")]
    if "all" in names:
        return None, True
    return [Schedule.parse(name) for name in names if name != AUTO], AUTO in names


def _shapes(
    m: int | None,
    n: int | None,
    k: int | None,
    scenarios: str | None,
    file: Path | None,
    dtype: str | None,
    result: str | None,
) -> tuple[Shape, ...]:
    sizes = [size for size in (m, n, k) if size is not None]
    if bool(sizes) + (scenarios is not None) + (file is not None) != 1:
        raise Unsupported(
            "say what to explore in one way: --m, --n and --k, or --scenarios ficco, "
            "or --shapes FILE.csv"
        )
    if file is not None:
        if dtype is not None or result is not None:
            raise Unsupported(
                "a file of shapes gives its dtypes in columns; leave out --dtype and --result"
            )
        return from_csv(file)
    dtype = dtype or "bfloat16"
    if scenarios is not None:
        if scenarios not in SETS:
            raise Unsupported(
                f"there are no scenarios {scenarios!r}{nearest(scenarios, SETS)}; "
                f"known: {', '.join(SETS)}"
            )
        return tuple(replace(shape, dtype=dtype, result=result) for shape in SETS[scenarios]())
    if m is None or n is None or k is None:
        raise Unsupported("a shape needs all three of --m, --n and --k")
    return (Shape(m, n, k, dtype=dtype, result=result),)


def _check_any(scenario: Scenario) -> None:
    """Raises unless at least one schedule fits the machine."""
    if not scenario.outcomes and scenario.auto is None:
        raise Unsupported(f"{scenario.shape.label}: {scenario.refused[0][1]}")


def _timelines(found: Exploration) -> list[Timeline]:
    timelines = []
    for scenario in found.scenarios:
        telling = {"shard-p2p@dma", "adaptive@dma", scenario.baseline.name}
        telling.add(scenario.best.schedule.name)
        for outcome in scenario.outcomes:
            name = outcome.schedule.name
            if len(found.scenarios) == 1:
                timelines.append(found.timeline(scenario.shape.label, outcome.schedule))
            elif name in telling:
                timeline = found.timeline(scenario.shape.label, outcome.schedule).of(0)
                timelines.append(replace(timeline, title=f"{scenario.shape.label} {name}"))
    return timelines
