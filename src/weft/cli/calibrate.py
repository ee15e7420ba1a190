"""`weft calibrate`: measures this machine and describes it for the simulator."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.console import Json, console, print_json, progress
from weft.files import check_targets
from weft.machine import Machine, calibrated
from weft.measure.calibration import FULL, QUICK, calibrate, keep
from weft.measure.user_launch import MOST_THREADS
from weft.report.terminal_table import table


def register(app: typer.Typer) -> None:
    app.command("calibrate")(command)


def command(
    quick: Annotated[
        bool, typer.Option("--quick", help="Two seconds instead of one minute.")
    ] = False,
    threads: Annotated[
        int,
        typer.Option(
            min=1,
            max=MOST_THREADS,
            help="Compute threads of a rank; the machine is then cpu-N-threads.",
        ),
    ] = 1,
    output: Annotated[
        Path | None, typer.Option(help="Write the description here, not to the user's cache.")
    ] = None,
    json: Json = False,
) -> None:
    """Measure GEMMs, copies, signals and calls here, and describe this machine as `cpu`."""
    check_targets(output)
    level = QUICK if quick else FULL
    start = time.perf_counter()
    with progress("calibrating", quiet=json) as report:
        machine = calibrate(level, report, threads)
    path = keep(machine, level, output)
    seconds = time.perf_counter() - start
    if json:
        found = {name: value for name, value, _ in key_figures(machine)}
        print_json(
            {
                "machine": machine.title,
                "name": machine.name,
                "file": str(path),
                "seconds": seconds,
                **found,
            }
        )
        return
    show(machine, path, seconds)


def show(machine: Machine, path: Path, seconds: float) -> None:
    """Prints the key figures, and where the description is."""
    rows: list[list[str | float]] = [
        [name.replace("_", " "), f"{value:.3g}", unit] for name, value, unit in key_figures(machine)
    ]
    console.print(table(["what", "", ""], rows, title=machine.title))
    use = f"use it as `--machine {machine.name}`"
    if machine.name == calibrated.NAME:
        use += ", or `weft run --predict`"
    console.print(f"{path} in {seconds:.0f} s; {use}.")


def key_figures(machine: Machine) -> list[tuple[str, float, str]]:
    """The most important numbers of a machine: name, value, unit."""
    host, curve = machine.host, machine.compute.saturation
    assert host is not None
    assert curve is not None
    return [
        ("gemm_rate", machine.compute.rate["float32"] / 1e9, "GFLOP/s, float32, one rank"),
        ("half_rate_rows", curve.m, "rows of A at which half of it is reached"),
        ("copy_bandwidth", machine.engines.bandwidth / 1e9, "GB/s, from another rank"),
        ("local_copy_bandwidth", machine.engines.local_bandwidth / 1e9, "GB/s, within a rank"),
        ("strided_row", machine.engines.row * 1e9, "ns, each further row of a copy"),
        ("permute_bandwidth", machine.memory.bandwidth / 1e9, "GB/s, read and written"),
        ("call", machine.launch.host * 1e6, "us, beyond its tasks"),
        ("task", machine.launch.kernel * 1e6, "us, beyond its GEMM"),
        ("decision", machine.launch.decision * 1e6, "us, adaptive"),
        ("wake_up", machine.engines.release * 1e6, "us, of an engine"),
        ("signal", machine.launch.signal * 1e6, "us, to a spinning rank"),
        ("nap", host.nap * 1e6, "us of the core, each sleep of an engine"),
        ("slice", host.slice * 1e6, "us, a thread keeps a core that others want"),
    ]
