"""`weft run`: measure schedules of an operation on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.console import (
    Columns,
    Dtype,
    Inner,
    Json,
    Rows,
    TopologyName,
    World,
    console,
    dtype_of,
    print_json,
    progress,
    schedules_of,
    topology_of,
)
from weft.operation import find
from weft.report.terminal import table
from weft.report.trace import write_trace
from weft.schedule import Schedule
from weft.study.measure import LinkSpec, Measurement, measure


def register(app: typer.Typer) -> None:
    app.command()(run)


def run(
    operation: Annotated[str, typer.Argument(help="The operation, e.g. all_gather_matmul.")],
    m: Rows = 2048,
    n: Columns = 1024,
    k: Inner = 2048,
    world: World = 2,
    dtype: Dtype = "float32",
    link: Annotated[
        str,
        typer.Option(
            help="memory, a rate (0.1GB/s), or balanced, 0.5x, 2x: the rate at which communication "
            "takes that multiple of compute."
        ),
    ] = "balanced",
    topology: TopologyName = "mesh",
    schedule: Annotated[
        str, typer.Option(help="all, or names separated by commas, e.g. serial,adaptive@dma.")
    ] = "all",
    repeat: Annotated[int, typer.Option(help="Measured rounds.", min=1)] = 15,
    threads: Annotated[int, typer.Option(help="Compute threads of each rank.", min=1)] = 1,
    json: Json = False,
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace of all schedules for Perfetto.")
    ] = None,
) -> None:
    """Spawn ranks here; measure compute alone, communication alone, serial, and each schedule."""
    asked = find(operation).of(m, n, k, world, dtype_of(dtype))
    spec = LinkSpec.parse(link, topology_of(topology))
    schedules = schedules_of(schedule, Schedule.space(asked))
    with progress(f"measuring {len(schedules)} schedules", quiet=json) as report:
        result = measure(asked, spec, schedules, repeat=repeat, threads=threads, report=report)
    if trace is not None:
        write_trace(trace, [arm.timeline for arm in result.arms])
    if json:
        print_json(result.to_json())
        return
    show(result, repeat)
    if trace is not None:
        console.print(f"trace: {trace} (open it at ui.perfetto.dev)")


def show(result: Measurement, repeat: int) -> None:
    """The measurement as a table."""
    console.print(
        f"{result.operation.label}, links: {result.link}\n"
        f"compute {result.compute * 1e3:.2f} ms, "
        f"communication {result.communication * 1e3:.2f} ms, "
        f"serial {result.serial * 1e3:.2f} ms, ideal {result.ideal * 1e3:.2f} ms"
    )
    rows: list[list[str | float]] = [
        [
            arm.name,
            round(arm.seconds * 1e3, 2),
            f"{arm.speedup:.2f}x",
            f"{arm.percent_of_ideal:.0f} %",
            f"{arm.gemm_slowdown:.2f}x",
            ", ".join(f"{n / 1e6:.1f} MB {e}" for e, n in arm.bytes_by_engine.items()),
        ]
        for arm in result.arms
    ]
    best = result.arms.index(result.best)
    headers = ["schedule", "ms", "speedup", "of ideal", "GEMM slowdown", "moved per rank"]
    caption = (
        f"Medians of {repeat} interleaved rounds, the slowest rank's time. GEMM slowdown: the "
        "pieces' time in the call against the whole GEMM alone."
    )
    console.print(table(headers, rows, best=best, caption=caption))
