"""`weft bench NAME`: measures the figures that weft promises, and checks them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
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
    documents = None if write is None else _generator(name, write)
    with progress(f"bench {name}", quiet=json) as report:
        result = function(report)
    if write is not None and documents is not None:
        _write(documents(result.found), write)
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


def _generator(name: str, folder: Path) -> Callable[[object], Mapping[str, str]]:
    """The function that makes the benchmark's documents, by path below the folder. Generators are
    not installed with weft; they are in the folder to which they write."""
    if not folder.is_dir():
        raise Unsupported(f"cannot write to {folder}: there is no such folder")
    path = folder / "generate" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"generate_{name}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise Unsupported(
            f"weft bench {name} has no documents to write to {folder}: {path} is missing"
        )
    sys.path.insert(0, str(folder.resolve()))  # generators import each other
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    documents: Callable[[object], Mapping[str, str]] = module.documents
    return documents


def _write(documents: Mapping[str, str], folder: Path) -> None:
    for place, text in documents.items():
        target = folder / place
        target.parent.mkdir(exist_ok=True)
        write_atomically(target, [text])
