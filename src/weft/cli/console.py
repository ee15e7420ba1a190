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

from weft.dtype import ON_HOST
from weft.errors import Unsupported, nearest
from weft.fabric.link import TOPOLOGIES, Topology
from weft.measure.launch import Report
from weft.schedule import Schedule

WIDTH = 100
"""Of tables, if the output is not a terminal."""
PROSE = 80
"""Of sentences, everywhere."""


class _Console(Console):
    """A console that wraps sentences at 80 columns, and gives tables all the width there is."""

    def print(self, *objects: Any, width: int | None = None, **options: Any) -> None:
        if width is None and objects and all(isinstance(one, str) for one in objects):
            width = min(PROSE, self.width)
        super().print(*objects, width=width, **options)


console = _Console(width=WIDTH if not sys.stdout.isatty() else None, highlight=False)
_errors = Console(stderr=True, highlight=False)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
World = Annotated[int, typer.Option(help="Number of ranks.", min=1, max=64)]
Rows = Annotated[int, typer.Option("--m", help="M: rows of the gathered X.", min=0)]
Columns = Annotated[int, typer.Option("--n", help="N: columns of W on every rank.", min=0)]
Inner = Annotated[int, typer.Option("--k", help="K: columns of X, rows of W.", min=0)]
Dtype = Annotated[str, typer.Option(help=f"One of {', '.join(ON_HOST)}.")]
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
    if name not in ON_HOST:
        raise Unsupported(
            f"there is no dtype {name!r}{nearest(name, ON_HOST)} here; use one of {list(ON_HOST)}"
        )
    return name


def schedules_of(text: str, space: Sequence[Schedule]) -> list[Schedule]:
    """`all`, or names separated by commas."""
    if text == "all":
        return list(space)
    return [Schedule.parse(name) for name in text.split(",")]
