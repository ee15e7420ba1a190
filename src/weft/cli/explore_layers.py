"""`weft explore --layers`: a step of a whole model, layer by layer, and what overlap saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from weft.cli.console import console, print_json, progress
from weft.errors import Unsupported
from weft.machine import Machine
from weft.operation import ranks_label
from weft.report.cells import Cell
from weft.report.terminal_table import table
from weft.schedule import Schedule
from weft.study.layers.huggingface import Run, read_config
from weft.study.layers.listing import Model, checked, read_layers
from weft.study.layers.timing import StepTime, time_step

_HEADERS = ("layer", "times", "serial\nms", "over-\nlapped", "best schedule", "saves\nin all")
_BOTH = ("machine", "serial\nms", "overlapped\nms", "auto\nms", "ideal\nms", "saves", "speedup")


def read_model(
    path: Path,
    world: int | None,
    dtype: str | None,
    batch: int | None,
    sequence: int | None,
    context: int | None,
    parallelism: str | None,
    step: str | None,
) -> Model:
    """The model of a TOML file, or of a `config.json` with what it does not say."""
    given = {
        "batch": batch,
        "sequence": sequence,
        "context": context,
        "parallelism": parallelism,
        "step": step,
    }
    said = {name: value for name, value in given.items() if value is not None}
    if path.suffix != ".json":
        if said:
            raise Unsupported(
                f"--{next(iter(said))} is for a config.json; {path.name} lists layers with their "
                "sizes, so change them there"
            )
        model = read_layers(path)
        changed = replace(model, world=world or model.world, dtype=dtype or model.dtype)
        return checked(changed, path.name)
    run = Run(**said, world=8 if world is None else world, dtype=dtype)  # type: ignore[arg-type]
    return read_config(path, run)


def explore_layers(
    machines: Sequence[Machine], model: Model, schedules: list[Schedule] | None, json: bool
) -> None:
    """One table per machine and a verdict; with several machines a comparison at the end."""
    found: list[StepTime] = []
    for machine in machines:
        with progress(f"simulating {machine.name}", quiet=json) as report:
            found.append(time_step(machine, model, schedules, report))
    if json:
        several = {"machines": [one.to_json() for one in found], "verdict": both(found)}
        print_json(found[0].to_json() if len(found) == 1 else several)
        return
    console.print(f"{model.title}, {ranks_label(model.world)}, {model.dtype}, simulated")
    for one in found:
        show(one)
    if len(found) > 1:
        rows: list[list[Cell]] = [
            [
                one.machine.name,
                1e3 * one.serial,
                1e3 * one.overlapped,
                1e3 * one.auto,
                1e3 * one.ideal,
                f"{100 * one.saves / one.serial:.1f} %",
                f"{one.serial / one.overlapped:.2f}x",
            ]
            for one in found
        ]
        best = min(range(len(found)), key=lambda place: found[place].overlapped)
        console.print(table(_BOTH, rows, best=best, width=min(80, console.width)))
        console.print(both(found))
    if model.assumptions:
        console.print(f"Assumed: {'; '.join(model.assumptions)}.")


def show(step: StepTime) -> None:
    """A row per layer, and the verdict."""
    rows: list[list[Cell]] = [
        [
            one.layer.name,
            one.layer.count,
            1e3 * one.serial,
            1e3 * one.overlapped,
            "" if one.schedule is None else one.schedule.name,
            1e3 * one.saves if one.layer.overlaps else None,
        ]
        for one in step.layers
    ]
    caption = (
        "Milliseconds of one layer: its collective waited for (serial), and under its best "
        "schedule (overlapped); then what that saves of a step, over all such layers."
    )
    console.print(
        table(
            _HEADERS,
            rows,
            title=step.machine.title,
            caption=caption,
            width=min(80, console.width),
            whole=(4,),
        )
    )
    console.print(step.verdict())


def both(found: Sequence[StepTime]) -> str:
    """Which machine is quickest, and what overlap does for each."""
    order = sorted(found, key=lambda one: one.overlapped)
    first, last = order[0], order[-1]
    times = last.overlapped / first.overlapped
    saves = ", ".join(f"{one.machine.name} {100 * one.saves / one.serial:.1f} %" for one in found)
    return (
        f"{first.machine.name} is the quickest, {times:.2f}x as fast as {last.machine.name}; "
        f"overlap saves: {saves}."
    )
