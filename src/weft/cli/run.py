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
    PerRank,
    Rows,
    Stopping,
    TopologyName,
    World,
    columns_per_rank,
    console,
    dtype_of,
    n_said,
    print_json,
    progress,
    say_written,
    schedules_of,
    stopped_after,
    topology_of,
)
from weft.errors import Unsupported
from weft.files import check_targets
from weft.loom.build import library, why_not
from weft.machine import load
from weft.measure.calibration import YARDSTICK
from weft.measure.link_spec import LinkSpec
from weft.measure.measurement import Measurement, measure
from weft.measure.stopping import stop_file
from weft.measure.user_launch import MOST_THREADS
from weft.operation import find
from weft.report.perfetto import write_trace
from weft.report.run_page import run_page
from weft.report.run_report import SHARE, drop_of, headers_of, rows_of, standing, verdict
from weft.report.terminal_table import table
from weft.schedule import ENGINES, Schedule
from weft.study.prediction import Prediction
from weft.study.prediction import predict as prediction_of


def register(app: typer.Typer) -> None:
    app.command()(run)


def run(
    operation: Annotated[str, typer.Argument(help="The operation, e.g. all_gather_matmul.")],
    m: Rows = 2048,
    n: Columns = None,
    n_per_rank: PerRank = None,
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
        str, typer.Option(help="all, or names separated by commas, e.g. auto,serial,adaptive@dma.")
    ] = "all",
    repeat: Annotated[int, typer.Option(help="Measured rounds.", min=1)] = 15,
    threads: Annotated[
        int, typer.Option(help="Compute threads of each rank.", min=1, max=MOST_THREADS)
    ] = 1,
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
    check_targets(html, trace)
    columns = columns_per_rank(n, n_per_rank, world)
    asked = find(operation).of(m, columns, k, world, dtype_of(dtype))
    spec = LinkSpec.parse(link, topology_of(topology))
    schedules, auto = schedules_of(schedule, Schedule.space(asked))
    if device != "cpu":
        check_device(device, predict)
        if schedule == "all":  # loom gives a speed to the copies of engines only
            engines = ("dma",) if device == "loom" else ENGINES
            schedules = [s for s in schedules if s.fusion != "kernel" and s.engine in engines]
    machine = load("cpu") if predict else None
    if predict and threads != 1:
        raise Unsupported("--predict needs --threads 1: `weft calibrate` measures one per rank")
    with stop_file() as stop, progress(f"measuring {len(schedules)} schedules", json) as report:
        result = measure(
            asked,
            spec,
            schedules,
            repeat=repeat,
            threads=threads,
            yardstick=YARDSTICK[1:] if predict else None,
            device=device,
            auto=auto,
            report=report,
            stop=stop,
        )
    rounds, stopping = len(result.best.samples), Stopping()
    if rounds < repeat:
        stopping = stopped_after(f"{rounds} of {repeat} rounds")
    prediction = None if machine is None else prediction_of(result, machine)
    if trace is not None:
        drawn = [arm.timeline for arm in result.every]
        write_trace(trace, drawn if prediction is None else prediction.timelines())
    if html is not None:
        run_page(html, result, prediction, title=f"weft run: {asked.label}")
    if json:
        found = (prediction or result).to_json()
        print_json(
            {
                **found,
                "n": columns * world,
                "n_per_rank": columns,
                "verdict": verdict(result),
                **stopping.json,
            }
        )
        stopping.end()
        return
    console.print(f"{asked.label}, links: {result.link}\n{n_said(columns, world)}")
    show(result, rounds, prediction)
    if device == "loom":
        console.print(
            "loom is an emulated device: these times show the order of work, not a GPU's speed."
        )
    say_written(html, trace)
    console.print(verdict(result))
    stopping.end()


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
        f"compute {result.compute * 1e3:.2f} ms, "
        f"communication {result.communication * 1e3:.2f} ms, "
        f"serial {result.serial * 1e3:.2f} ms, ideal {result.ideal * 1e3:.2f} ms"
    )
    first = standing(result).first
    places = [place for place, arm in enumerate(result.arms) if arm.name in first]
    caption = (
        f"Medians of {repeat} interleaved rounds, of the slowest rank; spread is half the distance "
        "of their quartiles. Speedup and share of gain are ratios within a round. "
        f"{SHARE} GEMM slowdown: the GEMMs of one recorded call against one alone."
    )
    shown = table(
        headers_of(prediction),
        rows_of(result, prediction),
        best=places[0] if len(places) == 1 else None,
        ties=places if len(places) > 1 else (),
        caption=caption,
        whole=(len(headers_of(prediction)) - 1,),
        drop=drop_of(prediction),
    )
    console.print(shown)
    if result.auto is not None:
        console.print(f"auto chooses {result.auto.chose}: {result.auto.why}.")
    if prediction is None:
        return
    console.print(
        f"Predicted with {prediction.machine.title} at {prediction.speed:.2f} of its calibrated "
        f"speed: median error {prediction.median_error_percent:.1f} % (two halves of the rounds "
        f"differ by {prediction.noise_percent:.1f} %), {prediction.first.arm.name} ranked first "
        f"({prediction.regret_percent:.1f} % slower than best), "
        f"{prediction.agreement_percent:.0f} % of pairs in the measured order."
    )
