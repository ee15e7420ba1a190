"""`weft bench NAME...`: measures the figures that weft promises, and checks them."""

from __future__ import annotations

import importlib.util
import json as json_module
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from weft import benchmarks
from weft.benchmarks import Result
from weft.cli.console import Json, Stopping, console, print_json, progress, stopped_after
from weft.errors import Error, Stopped, Unsupported
from weft.files import write_atomically
from weft.measure.provenance import provenance
from weft.report.terminal_table import table

ALL = "all"
QUICK = "overlap"
"""What a quick run measures if nothing is named."""
QUICKLY = (
    "A quick run of small cases with few rounds: it shows that the benchmark works here, and "
    "judges no target. Leave out --quick to measure what weft promises."
)
PAGE = "benchmarks"
"""The generator of the page of all benchmarks, and the folder of the stored results."""

Documents = Callable[[object], Mapping[str, str]]


def register(app: typer.Typer) -> None:
    app.command()(bench)


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(help=f"`{ALL}`, or some of: {', '.join(benchmarks.names())}."),
    ] = None,
    json: Json = False,
    quick: Annotated[
        bool,
        typer.Option(
            help=f"A few small cases in some seconds, which judge no target. [default: {QUICK}]"
        ),
    ] = False,
    write: Annotated[
        Path | None,
        typer.Option(
            help="Store the results below this folder and write the documents made of them (docs)."
        ),
    ] = None,
) -> None:
    """Measure what weft promises; exits with 1 if a target is missed or cannot be measured."""
    if not names and not quick:
        raise Unsupported(f"say which: {ALL}, or some of {', '.join(benchmarks.names())}")
    if quick and write is not None:
        raise Unsupported("a quick run is too short to be stored; leave out --quick or --write")
    every = benchmarks.quick_names() if quick else benchmarks.names()
    chosen = every if names == [ALL] else list(dict.fromkeys(names or [QUICK]))
    find = benchmarks.find_quick if quick else benchmarks.find
    functions = {name: find(name) for name in chosen}
    writers = {} if write is None else {name: _writer(name, write) for name in chosen}
    results: dict[str, Result] = {}
    failed: dict[str, str] = {}
    stopping = Stopping()
    for name, function in functions.items():
        try:
            with progress(f"bench {name}", quiet=json) as report:
                results[name] = function(report)
        except KeyboardInterrupt as interrupt:
            if isinstance(interrupt, Stopped) and isinstance(interrupt.so_far, Result):
                results[name] = interrupt.so_far
            if not results:
                raise
            stopping = stopped_after(_done(results, len(chosen), name))
        except Error as error:
            if len(chosen) == 1:
                raise
            failed[name] = str(error)
            continue
        if name in writers and not stopping.said:
            writers[name](results[name])
        if not json and name in results:
            _print(name, results[name], quick)
        if stopping.said:
            break
    if json:
        found: dict[str, Any] = {name: result.to_json() for name, result in results.items()}
        found |= {name: {"error": message} for name, message in failed.items()}
        found = found if len(chosen) > 1 else found[chosen[0]]
        print_json({**found, **({"quick": True} if quick else {}), **stopping.json})
    else:
        console.print(_verdict(results, failed, quick))
    stopping.end()
    missed = any(not check.ok for result in results.values() for check in result.checks)
    if failed or (missed and not quick):
        raise typer.Exit(1)


def _done(results: Mapping[str, Result], count: int, name: str) -> str:
    whole = len(results) - (name in results)
    text = f"{whole} of {count} benchmarks"
    return f"{text} and a part of {name}" if name in results else text


def _print(name: str, result: Result, quick: bool = False) -> None:
    title = f"weft bench {name}" + (
        " --quick: some small cases, not the benchmark" if quick else ""
    )
    console.print(table([_shown(h) for h in result.headers], result.rows, title=title))
    said = {False: "MISSED", True: "ok"}
    rows = [
        [_shown(c.name), f"{c.value:.3g}", c.bar, "not judged" if quick else said[c.ok]]
        for c in result.checks
    ]
    console.print(table(["check", "value", "target", ""], rows))


def _shown(name: str) -> str:
    """A header or a check in the words of other commands; stored results keep the old ones."""
    return name.replace("% of ideal", "share of gain, %").replace("of ideal %", "share of gain %")


def _verdict(results: Mapping[str, Result], failed: Mapping[str, str], quick: bool) -> str:
    checks = [check for result in results.values() for check in result.checks]
    missed = sum(not check.ok for check in checks)
    kept = f"{len(checks) - missed} of {len(checks)} targets are kept, {missed} missed."
    lines = [QUICKLY if quick else kept]
    lines += [f"{name} could not be measured: {message}" for name, message in failed.items()]
    return "\n".join(lines)


def _writer(name: str, folder: Path) -> Callable[[Result], None]:
    """The function that stores a result and writes the documents made of it. Raises unless the
    folder has a generator for them, so that no measurement is lost."""
    if not os.path.isdir(folder):
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
