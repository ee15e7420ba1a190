"""Shared by all commands: output, progress, JSON, and common options."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn, get_args

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from weft.errors import Unsupported, nearest
from weft.fabric.link import TOPOLOGIES, Topology
from weft.measure.launch import Report
from weft.operation import ITEM_BYTES
from weft.schedule import Schedule

WIDTH = 100

console = Console(width=WIDTH if not sys.stdout.isatty() else None, highlight=False)
_errors = Console(stderr=True, highlight=False)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
World = Annotated[int, typer.Option(help="Number of ranks.", min=1, max=64)]
Rows = Annotated[int, typer.Option("--m", help="M: rows of the gathered X.", min=0)]
Columns = Annotated[int, typer.Option("--n", help="N: columns of W on every rank.", min=0)]
Inner = Annotated[int, typer.Option("--k", help="K: columns of X, rows of W.", min=0)]
Dtype = Annotated[str, typer.Option(help=f"One of {', '.join(list(ITEM_BYTES)[:4])}.")]
TopologyName = Annotated[str, typer.Option(help=f"One of {', '.join(TOPOLOGIES)}.")]


def fail(message: str, *, json: bool = False, code: int = 2) -> NoReturn:
    """Prints an error and exits."""
    if json:
        print(json_module.dumps({"error": message}))
    _errors.print(f"weft: {message}", markup=False, style="red", soft_wrap=True)
    sys.exit(code)


def print_json(value: Any) -> None:
    print(json_module.dumps(value, indent=2))


@contextmanager
def progress(title: str, quiet: bool = False) -> Iterator[Report]:
    """A progress bar on stderr; silent if stderr is not a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    hidden = quiet or not sys.stderr.isatty()
    with Progress(*columns, console=_errors, transient=True, disable=hidden) as bar:
        task = bar.add_task(title, total=1.0)

        def report(share: float, text: str) -> None:
            bar.update(task, completed=share, description=f"{title}: {text}" if text else title)

        yield report


def topology_of(name: str) -> Topology:
    if name not in get_args(Topology):
        raise Unsupported(
            f"there is no topology {name!r}{nearest(name, TOPOLOGIES)}; "
            f"the topologies are {', '.join(TOPOLOGIES)}"
        )
    return name  # type: ignore[return-value]


def dtype_of(name: str) -> str:
    known = list(ITEM_BYTES)[:4]
    if name not in known:
        raise Unsupported(
            f"there is no dtype {name!r}{nearest(name, known)} here; use one of {known}"
        )
    return name


def schedules_of(text: str, space: Sequence[Schedule]) -> list[Schedule]:
    """`all`, or names separated by commas."""
    if text == "all":
        return list(space)
    return [Schedule.parse(name) for name in text.split(",")]
