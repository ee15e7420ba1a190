"""The part of `weft doctor --gpu` that people see: the checks of a device as a table."""

from __future__ import annotations

from pathlib import Path

from weft.cli.console import console, progress
from weft.machine.calibrated import write
from weft.measure.gpu.finding import POINTS, Examination
from weft.report.terminal_table import table

SEND = (
    "Please send the file of `weft doctor --gpu --json`, whatever it says: it has no names and no "
    "paths (docs/gpu-reports/README.md)."
)


def examined(device: str, json: bool) -> Examination:
    """The examination of the devices here, with a progress bar."""
    from weft.measure.gpu.examine import examine

    with progress("examining", quiet=json) as report:
        return examine(device, report)


def show(examination: Examination, machine: Path | None) -> None:
    """Prints the checks, point by point, and writes the machine file if asked to."""
    rows, last = [], 0
    for check in examination.checks:
        if check.point != last:
            rows.append([f"{check.point} {POINTS[check.point]}", "", ""])
        last = check.point
        found = f"{check.found}: {check.remedy}" if check.remedy else check.found
        rows.append([f"  {check.what}", check.state, found])
    headers = ["what", "", "found, and what to do"]
    console.print(table(headers, rows, width=min(80, console.width), whole=(0, 1)))
    if machine is not None:
        write_machine(examination, machine)
        console.print(f"weft explore --machine {machine} uses the figures of point 8.")
    console.print(examination.verdict)
    console.print(SEND)


def write_machine(examination: Examination, machine: Path) -> None:
    if examination.machine:
        write(machine, examination.machine)
