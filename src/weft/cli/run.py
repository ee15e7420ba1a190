"""`weft run`: measures the schedules of an operation on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
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
from weft.errors import Unsupported
from weft.loom.build import library, why_not
from weft.machine import load
from weft.measure.calibration import YARDSTICK
from weft.measure.measurement import LinkSpec, Measurement, measure
from weft.operation import find
from weft.report.page import timelines_page
from weft.report.perfetto import write_trace
from weft.report.terminal import table
from weft.schedule import ENGINES, Schedule
from weft.study.prediction import Prediction
from weft.study.prediction import predict as prediction_of


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
    device: Annotated[
        str,
        typer.Option(help="Where tensors are: cpu, loom (an emulated device, docs/loom.md), cuda."),
    ] = "cpu",
    json: Json = False,
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace of all schedules for Perfetto.")
    ] = None,
    predict: Annotated[
        bool, typer.Option("--predict", help="Compare with the simulation of this machine.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page of all timelines.")] = None,
) -> None:
    """Start ranks here; measure compute alone, communication alone, serial, and each schedule."""
    asked = find(operation).of(m, n, k, world, dtype_of(dtype))
    spec = LinkSpec.parse(link, topology_of(topology))
    schedules = schedules_of(schedule, Schedule.space(asked))
    if device != "cpu":
        check_device(device, predict)
        if schedule == "all":  # loom gives a speed to the copies of engines only
            engines = ("dma",) if device == "loom" else ENGINES
            schedules = [s for s in schedules if s.fusion != "kernel" and s.engine in engines]
    machine = load("cpu") if predict else None
    if predict and threads != 1:
        raise Unsupported("--predict needs --threads 1: `weft calibrate` measures one per rank")
    with progress(f"measuring {len(schedules)} schedules", quiet=json) as report:
        result = measure(
            asked,
            spec,
            schedules,
            repeat=repeat,
            threads=threads,
            yardstick=YARDSTICK[1:] if predict else None,
            device=device,
            report=report,
        )
    prediction = None if machine is None else prediction_of(result, machine)
    drawn = [arm.timeline for arm in result.arms] if not prediction else prediction.timelines()
    if trace is not None:
        write_trace(trace, drawn)
    if html is not None:
        timelines_page(html, drawn, title=f"weft run: {asked.label}", ideal=result.ideal)
    if json:
        print_json((prediction or result).to_json())
        return
    show(result, repeat, prediction)
    if device == "loom":
        console.print(
            "loom is an emulated device: these times show the order of work, not a GPU's speed."
        )
    if trace is not None:
        console.print(f"trace: {trace} (open it at ui.perfetto.dev)")
    if html is not None:
        console.print(f"page: {html} (opens offline)")


def check_device(device: str, predict: bool) -> None:
    """Raises unless schedules can be measured on a device; builds loom if need be."""
    if device == "cpu":
        return
    if predict:
        raise Unsupported("--predict compares with a simulated host, so it needs --device cpu")
    if device == "loom":
        reason = why_not()
        if reason:
            raise Unsupported(f"loom cannot run here: {reason}")
        with progress("building loom", quiet=True) as report:
            library(report)
    elif not torch.accelerator.is_available():
        raise Unsupported(f"this machine has no {device} device; use --device loom to emulate one")


def show(result: Measurement, repeat: int, prediction: Prediction | None = None) -> None:
    """Prints the measurement as a table, with the prediction if there is one."""
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
        f"Medians of {repeat} interleaved rounds, of the slowest rank. Speedup and percent of "
        "ideal are ratios within a round. GEMM slowdown: the GEMMs of a call against one alone."
    )
    if prediction is None:
        console.print(table(headers, rows, best=best, caption=caption))
        return
    headers[2:2] = ["predicted", "error"]
    for row, forecast in zip(rows, prediction.forecasts, strict=True):
        row[2:2] = [round(forecast.seconds * 1e3, 2), f"{forecast.error_percent:+.0f} %"]
    console.print(table(headers[:-1], [row[:-1] for row in rows], best=best, caption=caption))
    console.print(
        f"Predicted with {prediction.machine.title} at {prediction.speed:.2f} of its calibrated "
        f"speed: median error {prediction.median_error_percent:.1f} % (two halves of the rounds "
        f"differ by {prediction.noise_percent:.1f} %), {prediction.first.arm.name} ranked first "
        f"({prediction.regret_percent:.1f} % behind the best), "
        f"{prediction.agreement_percent:.0f} % of pairs in the measured order."
    )
