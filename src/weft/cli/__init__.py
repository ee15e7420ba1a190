"""The command line, a thin layer over the library. A command is one file in this folder with a
function `register(app)`."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys

import typer

from weft.cli.console import fail
from weft.errors import Error

app = typer.Typer(
    name="weft",
    help="Hides communication behind computation in distributed ML: run, explain, explore.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def _version(
    version: bool = typer.Option(False, "--version", help="Print the version and stop."),
) -> None:
    if version:
        from weft.fabric import VERSION

        typer.echo(f"weft {VERSION}")
        raise typer.Exit


@functools.cache
def _find_commands() -> None:
    """Registers all commands, once per process."""
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__)):
        found = importlib.import_module(f"{__name__}.{module}")
        if hasattr(found, "register"):
            found.register(app)


def main() -> None:
    """The entry point of `weft`. Bad input ends with one sentence, not with a traceback."""
    _find_commands()
    try:
        app()
    except Error as error:
        fail(str(error), json="--json" in sys.argv)
    except KeyboardInterrupt:
        fail("stopped", code=130)
    except BrokenPipeError:
        # The reader of the output has closed it, as `head` does.
        sys.stderr.close()
        sys.exit(0)
