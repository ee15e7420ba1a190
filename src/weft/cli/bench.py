"""`weft bench NAME`: the figures that weft promises, as a table with pass marks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft import benchmarks
from weft.cli.console import Json, console, print_json, progress
from weft.errors import Unsupported
from weft.report.files import write_atomically
from weft.report.terminal import table


def register(app: typer.Typer) -> None:
    app.command()(bench)


def bench(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(benchmarks.names())}.")],
    json: Json = False,
    write: Annotated[
        Path | None,
        typer.Option(
            help="Write the documents of the benchmark below this folder (fidelity: docs)."
        ),
    ] = None,
) -> None:
    """Measure what weft promises; exits with 1 if a bar is missed."""
    function = benchmarks.find(name)
    if write is not None and not write.is_dir():
        raise Unsupported(f"cannot write to {write}: there is no such folder")
    with progress(f"bench {name}", quiet=json) as report:
        result = function(report)
    if write is not None:
        _write(name, result, write)
    missed = [check for check in result.checks if not check.ok]
    if json:
        print_json(result.to_json())
    else:
        console.print(table(result.headers, result.rows, title=f"weft bench {name}"))
        rows = [
            [c.name, f"{c.value:.3g}", c.bar, "ok" if c.ok else "MISSED"] for c in result.checks
        ]
        console.print(table(["check", "value", "bar", ""], rows))
    if missed:
        raise typer.Exit(1)


def _write(name: str, result: benchmarks.Result, folder: Path) -> None:
    if not result.documents:
        raise Unsupported(f"weft bench {name} has no documents to write")
    for place, text in result.documents.items():
        target = folder / place
        target.parent.mkdir(exist_ok=True)
        write_atomically(target, [text])
