"""`weft bench NAME`: the figures that weft promises, as a table with pass marks."""

from __future__ import annotations

from typing import Annotated

import typer

from weft import benchmarks
from weft.cli.console import Json, console, print_json, progress
from weft.report.terminal import table


def register(app: typer.Typer) -> None:
    app.command()(bench)


def bench(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(benchmarks.names())}.")],
    json: Json = False,
) -> None:
    """Measure what weft promises; exits with 1 if a bar is missed."""
    function = benchmarks.find(name)
    with progress(f"bench {name}", quiet=json) as report:
        result = function(report)
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
