"""`weft soak`: random calls for a given time, while ranks are stopped or killed."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Annotated, Any

import typer

from weft.cli.console import Json, console, print_json, progress
from weft.measure.soak.places import PLACES, places_of
from weft.measure.soak.soaking import Findings
from weft.measure.soak.soaking import soak as run
from weft.measure.soak.subjects import left_out
from weft.report.terminal_table import table


def register(app: typer.Typer) -> None:
    app.command()(soak)


def soak(
    seconds: Annotated[float, typer.Option(help="How long.", min=1.0, max=1e7)] = 60.0,
    kill: Annotated[
        bool,
        typer.Option(
            "--kill", help="Also kill ranks. Their peers must name them and go on without them."
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="The same seed makes the same calls.", min=0)] = 0,
    fabric: Annotated[
        str, typer.Option(help=f"all, or some of {', '.join(PLACES)}, separated by commas.")
    ] = "all",
    json: Json = False,
) -> None:
    """Make random calls of all operators and collectives, with random sizes, dtypes, schedules,
    groups, threads, delays and stops. Every result is compared with plain torch, bit for bit, and
    memory, files and threads must not grow. Exits with 0 if all was right, otherwise with 1."""
    places = places_of(fabric)
    with progress("soaking", quiet=json) as report:
        found = run(seconds, places, kill, seed, report)
    if json:
        print_json(to_json(found))
    else:
        show(found)
    raise typer.Exit(0 if found.right else 1)


def to_json(found: Findings) -> dict[str, Any]:
    """The findings for `--json`."""
    counts = {"calls": dict(found.calls), "lives": dict(found.lives)}
    plain = {field.name: getattr(found, field.name) for field in fields(found)}
    plain |= {**counts, "growth": asdict(found.growth), "not_called": left_out()}
    return {**plain, "verdict": verdict(found), "exit": 0 if found.right else 1}


def show(found: Findings) -> None:
    """Prints the findings."""
    rows = [[name, str(count)] for name, count in sorted(found.calls.items())]
    console.print(table(("function", "calls"), rows, caption="Calls of all ranks."))
    if left_out():
        console.print(f"not called by themselves: {', '.join(left_out())}")
    lives = ", ".join(f"{count} on {name}" for name, count in found.lives.items())
    console.print(f"lives: {lives}; stops: {found.stops}; short of memory: {found.pressures}")
    grown = found.growth
    console.print(
        f"growth in the second half of a life, at most: {grown.resident / 2**20:.1f} MiB, "
        f"{grown.files} files, {grown.threads} threads"
    )
    if found.kills:
        console.print(
            f"kills: {found.kills}; named by all survivors after {_times(found.named_after)}; "
            f"first right call in a new group after {_times(found.again_after)}"
        )
    for fault in found.faults:
        console.print(fault, soft_wrap=True)
    console.print(verdict(found))


def verdict(found: Findings) -> str:
    calls = sum(found.calls.values())
    if found.right:
        return f"All {calls} calls in {found.seconds:.0f} s were right (seed {found.seed})."
    if not found.faults:
        return "No call was made; allow more seconds."
    many = len(found.faults)
    return f"{many} fault{'s' * (many != 1)} in {calls} calls; seed {found.seed} repeats them."


def _times(seconds: list[float]) -> str:
    if not seconds:
        return "-"
    ordered = sorted(seconds)
    return f"{ordered[len(ordered) // 2]:.2f} s (median), {ordered[-1]:.2f} s (longest)"
