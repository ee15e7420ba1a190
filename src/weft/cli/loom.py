"""`weft loom`: runs a user's multi-GPU script without a GPU, and finds missing waits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.console import Json, World, console, print_json, progress
from weft.errors import Unsupported

app = typer.Typer(
    help="An emulated accelerator: check a script of streams on several ranks, without a GPU.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def register(parent: typer.Typer) -> None:
    parent.add_typer(app, name="loom")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def check(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="A script as torchrun starts it.")],
    world: World = 2,
    mode: Annotated[str, typer.Option(help="When operations run: late, eager or random.")] = "late",
    queues: Annotated[
        int, typer.Option(help="Hardware queues that all streams share: 1, 2 or 4; 0: one each.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of the delays of mode random.", min=0)] = 0,
    pace: Annotated[str, typer.Option(help="Speed of every link, for example 1GB/s.")] = "0",
    deadline: Annotated[float, typer.Option(help="Seconds that one wait may take.")] = 60.0,
    json: Json = False,
) -> None:
    """Run a script on every rank with a device `loom`, and report races, deadlocks and touches of
    device memory by the host. Exits with 0 where nothing was found, with 1 where something was,
    with 2 where the script itself failed."""
    from weft.loom.check import check as run
    from weft.loom.settings import Settings, parse_pace

    if queues not in (0, 1, 2, 4):
        raise Unsupported(f"streams can share 1, 2 or 4 hardware queues, not {queues}")
    settings = Settings(
        mode=mode, queues=queues, seed=seed, pace=parse_pace(pace), deadline=deadline
    )
    with progress("loom", quiet=json) as report:
        outcome = run(
            script, context.args, world=world, settings=settings, quiet=json, report=report
        )
    if json:
        print_json(
            {
                "findings": [f.to_json() for f in outcome.findings],
                "failed": outcome.failed,
                "ranks": [{"rank": r, "exit": code} for r, code in enumerate(outcome.codes)],
                "world": world,
                "mode": mode,
                "queues": queues,
                "seed": seed,
                "seconds": round(outcome.seconds, 3),
                "exit": outcome.exit_code,
            }
        )
    else:
        here = f"{Path.cwd()}/"
        for number, finding in enumerate(outcome.findings, 1):
            times = f", {finding.times} times" if finding.times > 1 else ""
            place = f" [{finding.place}]" if finding.place else ""
            text = f"{number}. {finding.kind}{times}: {finding.text}{place}"
            console.print(text.replace(here, ""), width=80)
        console.print(_verdict(outcome.exit_code, len(outcome.findings), outcome.failed, world))
    raise typer.Exit(outcome.exit_code)


def _verdict(code: int, found: int, failed: str, world: int) -> str:
    ranks = f"{world} rank" + "s" * (world != 1)
    if code == 0:
        return f"Nothing was found on {ranks}."
    if code == 2:
        return f"The script itself failed: {failed}."
    return f"{found} finding{'s' * (found != 1)} on {ranks}."


@app.command()
def build(json: Json = False) -> None:
    """Build loom for the torch that is installed, which is otherwise done when it is first used."""
    from weft.loom.build import library

    with progress("loom", quiet=json) as report:
        path = library(report)
    if json:
        print_json({"library": str(path)})
    else:
        console.print(f"loom is built: {path}", soft_wrap=True)
