"""Shared by all commands: output, progress, JSON, and common options."""

from __future__ import annotations

import json as json_module
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, get_args

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from weft.dtype import ON_HOST
from weft.errors import Stopped, Unsupported, nearest, printable
from weft.fabric.link import TOPOLOGIES, Topology
from weft.measure.launch import Report
from weft.measure.stopping import stop_file
from weft.schedule import Schedule
from weft.select.decision import AUTO

WIDTH = 100
"""Of tables, if the output is not a terminal and COLUMNS is not set."""
PROSE = 80
"""Of sentences, everywhere."""
_DIGITS = 9
"""Of COLUMNS, at most."""
DEFAULT_COLUMNS = 1024
"""N on each rank, where neither --n nor --n-per-rank is given."""


class _Console(Console):
    """A console that wraps sentences at 80 columns, and gives tables all the width there is. Text
    is shown as it is, for the name of a file or a model may look like rich's markup, or steer a
    terminal."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text, kept="\n"), **options)

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError

    def print(self, *objects: Any, width: int | None = None, **options: Any) -> None:
        if width is None and objects and all(isinstance(one, str) for one in objects):
            width = min(PROSE, self.width)
        super().print(*objects, width=width, **options)


def _width() -> int | None:
    """COLUMNS where it is set, else that of the terminal (None: rich finds it), else WIDTH."""
    asked = os.environ.get("COLUMNS", "")
    if len(asked) > _DIGITS:
        del os.environ["COLUMNS"]  # Python refuses to read it, and rich would try
    elif asked.isdecimal() and int(asked) > 0:
        return int(asked)
    return None if sys.stdout is not None and sys.stdout.isatty() else WIDTH


console = _Console(width=_width())
_errors = _Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
World = Annotated[int, typer.Option(help="Number of ranks.", min=1, max=64)]
Rows = Annotated[int, typer.Option("--m", help="M: rows of the gathered X.", min=0)]
Columns = Annotated[
    int | None,
    typer.Option(
        "--n",
        help="N: columns of W over all ranks; each has N / world of them. "
        "[default: 1024 on each rank]",
        min=0,
    ),
]
PerRank = Annotated[
    int | None, typer.Option("--n-per-rank", help="Instead of --n: columns on each rank.", min=0)
]
Inner = Annotated[int, typer.Option("--k", help="K: columns of X, rows of W.", min=0)]
Dtype = Annotated[str, typer.Option(help=f"One of {', '.join(ON_HOST)}.")]
TopologyName = Annotated[str, typer.Option(help=f"One of {', '.join(TOPOLOGIES)}.")]


def fail(message: str, *, json: bool = False, code: int = 2) -> NoReturn:
    """Prints an error and exits."""
    if json:
        print(json_module.dumps({"error": message}))
    _errors.print(f"weft: {message}", style="red", soft_wrap=True)
    sys.exit(code)


def print_json(value: Any) -> None:
    print(json_module.dumps(value, indent=2))


@contextmanager
def progress(title: str, quiet: bool = False) -> Iterator[Report]:
    """A progress bar on stderr; silent if stderr is not a terminal."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    hidden = quiet or not sys.stderr.isatty()
    with Progress(*columns, console=_errors, transient=True, disable=hidden) as bar:
        task = bar.add_task(printable(title), total=1.0)

        def report(share: float, text: str) -> None:
            shown = printable(f"{title}: {text}" if text else title)
            bar.update(task, completed=share, description=shown)

        yield report


@dataclass
class Stopping:
    """Whether a command was stopped by Ctrl-C, and how far it had come."""

    said: str = ""

    @property
    def json(self) -> dict[str, Any]:
        return {"partial": True, "stopped": self.said} if self.said else {}

    def end(self) -> None:
        """Says that what was printed is partial, and exits as after Ctrl-C."""
        if self.said:
            _errors.print(f"weft: {self.said}", style="red", soft_wrap=True)
            sys.exit(130)


T = TypeVar("T")


def until_stopped(work: Callable[[], T], done: Callable[[T], str]) -> tuple[T, Stopping]:
    """The result of `work`; after Ctrl-C that of what was finished. done: how much that is."""
    try:
        return work(), Stopping()
    except Stopped as stopped:
        found: T = stopped.so_far  # type: ignore[assignment]
        return found, stopped_after(done(found))


def measured_until_stopped(
    work: Callable[[str], T], done: Callable[[T], str]
) -> tuple[T, Stopping]:
    """The same for a measurement on ranks, which gets the path of a file: it ends after the round
    in which Ctrl-C makes the file."""
    with stop_file() as path:
        found = work(path)
        return found, stopped_after(done(found)) if os.path.exists(path) else Stopping()


def stopped_after(done: str) -> Stopping:
    return Stopping(f"stopped: these results are partial, of {done}")


def say_written(html: Path | None = None, trace: Path | None = None) -> None:
    """Which files a command has written."""
    if html is not None:
        console.print(f"page: {html} (opens offline)", soft_wrap=True)
    if trace is not None:
        console.print(f"trace: {trace} (open it at ui.perfetto.dev)", soft_wrap=True)


def total_columns(n: int | None, per_rank: int | None, world: int) -> int | None:
    """N over all ranks, from --n or --n-per-rank; None if neither is given."""
    if n is not None and per_rank is not None:
        raise Unsupported("say N once: --n counts all ranks, --n-per-rank one")
    return n if per_rank is None else per_rank * world


def columns_per_rank(n: int | None, per_rank: int | None, world: int) -> int:
    """The columns of one rank, from --n or --n-per-rank."""
    total = total_columns(n, per_rank, world)
    return DEFAULT_COLUMNS if total is None else -(-total // world)


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


def n_said(per_rank: int, world: int) -> str:
    """Both numbers that N can mean."""
    if world == 1:
        return f"N is {per_rank}, all on one rank"
    return f"N is {per_rank * world} over all {world} ranks, {per_rank} on each"


def schedules_of(text: str, space: Sequence[Schedule]) -> tuple[list[Schedule], bool]:
    """`all`, or names separated by commas; and whether `auto` is among them."""
    names = [name.strip() for name in text.split(",")]
    if "all" in names:
        return list(space), True
    return [Schedule.parse(name) for name in names if name != AUTO], AUTO in names
