"""`weft bench NAME...`: measures the figures that weft promises, and checks them."""

from __future__ import annotations

import importlib.util
import json as json_module
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from weft import benchmarks
from weft.benchmarks import Result
from weft.cli.console import Json, console, print_json, progress
from weft.errors import Error, Unsupported
from weft.files import write_atomically
from weft.measure.provenance import provenance
from weft.report.terminal_table import table

ALL = "all"
PAGE = "benchmarks"
"""The generator of the page of all benchmarks, and the folder of the stored results."""

Documents = Callable[[object], Mapping[str, str]]


def register(app: typer.Typer) -> None:
    app.command()(bench)


def bench(
    names: Annotated[
        list[str],
        typer.Argument(help=f"`{ALL}`, or some of: {', '.join(benchmarks.names())}."),
    ],
    json: Json = False,
    write: Annotated[
        Path | None,
        typer.Option(
            help="Store the results below this folder and write the documents made of them (docs)."
        ),
    ] = None,
) -> None:
    """Measure what weft promises; exits with 1 if a target is missed or cannot be measured."""
    chosen = benchmarks.names() if names == [ALL] else list(dict.fromkeys(names))
    functions = {name: benchmarks.find(name) for name in chosen}
    writers = {} if write is None else {name: _writer(name, write) for name in chosen}
    results: dict[str, Result] = {}
    failed: dict[str, str] = {}
    for name, function in functions.items():
        try:
            with progress(f"bench {name}", quiet=json) as report:
                results[name] = function(report)
        except Error as error:
            if len(chosen) == 1:
                raise
            failed[name] = str(error)
            continue
        if name in writers:
            writers[name](results[name])
        if not json:
            _print(name, results[name])
    if json:
        found: dict[str, Any] = {name: result.to_json() for name, result in results.items()}
        found |= {name: {"error": message} for name, message in failed.items()}
        print_json(found if len(chosen) > 1 else found[chosen[0]])
    else:
        console.print(_verdict(results, failed))
    if failed or any(not check.ok for result in results.values() for check in result.checks):
        raise typer.Exit(1)


def _print(name: str, result: Result) -> None:
    console.print(table(result.headers, result.rows, title=f"weft bench {name}"))
    rows = [[c.name, f"{c.value:.3g}", c.bar, "ok" if c.ok else "MISSED"] for c in result.checks]
    console.print(table(["check", "value", "target", ""], rows))


def _verdict(results: Mapping[str, Result], failed: Mapping[str, str]) -> str:
    checks = [check for result in results.values() for check in result.checks]
    missed = sum(not check.ok for check in checks)
    lines = [f"{len(checks) - missed} of {len(checks)} targets are kept, {missed} missed."]
    lines += [f"{name} could not be measured: {message}" for name, message in failed.items()]
    return "\n".join(lines)


def _writer(name: str, folder: Path) -> Callable[[Result], None]:
    """The function that stores a result and writes the documents made of it. Raises unless the
    folder has a generator for them, so that no measurement is lost."""
    if not folder.is_dir():
        raise Unsupported(f"cannot write to {folder}: there is no such folder")
    own, page = _generator(name, folder), _generator(PAGE, folder)
    if own is None and page is None:
        path = folder / "generate" / f"{name}.py"
        raise Unsupported(
            f"weft bench {name} has no documents to write to {folder}: {path} is missing"
        )

    def write(result: Result) -> None:
        if own is not None:
            documents: Documents = own.documents
            _write(documents(result.found), folder)
        if page is not None:
            stored = {"benchmark": name, **asdict(provenance(folder)), **result.to_json()}
            text = json_module.dumps(stored, indent=1) + "\n"
            _write({f"{PAGE}/{name}.json": text}, folder)
            from_stored: Callable[[Path, Sequence[str]], Mapping[str, str]] = page.documents
            _write(from_stored(folder, benchmarks.names()), folder)

    return write


def _generator(name: str, folder: Path) -> ModuleType | None:
    """The generator of that name, if there is one. Generators are not installed with weft; they
    are in the folder to which they write."""
    path = folder / "generate" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"generate_{name}", path)
    if spec is None or spec.loader is None or not path.is_file():
        return None
    sys.path.insert(0, str(folder.resolve()))  # generators import each other
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up the module of their class
    spec.loader.exec_module(module)
    return module


def _write(documents: Mapping[str, str], folder: Path) -> None:
    for place, text in documents.items():
        target = folder / place
        target.parent.mkdir(exist_ok=True)
        write_atomically(target, [text])
