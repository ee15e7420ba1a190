"""The command line, a thin layer over the library. A command is one file in this folder with a
function `register(app)`."""

from __future__ import annotations

import errno
import functools
import importlib
import os
import pkgutil
import sys
from json import dumps
from typing import Any

import typer
from typer.core import TyperGroup

from weft.cli.console import fail
from weft.errors import Error


class _Commands(TyperGroup):
    """Ends a command with one sentence and no traceback. Done here, inside of typer, which ends
    without a word after Ctrl-C."""

    def invoke(self, context: Any) -> Any:
        json = "--json" in sys.argv
        try:
            found = super().invoke(context)
            if sys.stdout is not None:
                sys.stdout.flush()  # Python would do it at its end, where nobody hears of an error
            return found
        except _UsageError as error:
            if json:
                print(dumps({"error": error.format_message()}))  # type: ignore[attr-defined]
            raise  # typer shows how the command is used
        except Error as error:
            fail(str(error), json=json)
        except KeyboardInterrupt:
            fail("stopped", json=json, code=130)
        except BrokenPipeError:  # the reader of the output has closed it, as `head` does
            _drop_output()
            sys.exit(0)
        except OSError as error:
            if error.errno in _FULL:
                _drop_output()
                fail(f"the output cannot be written: {error.strerror}")
            if error.errno in _REFUSED:
                where = f" ({error.filename})" if error.filename else ""
                fail(f"the system refuses what this needs: {error.strerror}{where}", json=json)
            raise


_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""Of all that typer finds wrong with arguments; the class is its own or click's, by its version."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_REFUSED = (
    *(errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM),  # too many files or processes
    *(errno.EACCES, errno.EPERM, errno.EROFS),
)


def _drop_output() -> None:
    """Lets what is still to be printed go nowhere, so that Python does not fail at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


app = typer.Typer(
    name="weft",
    cls=_Commands,
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
def find_commands() -> None:
    """Registers all commands, once per process."""
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__)):
        found = importlib.import_module(f"{__name__}.{module}")
        if hasattr(found, "register"):
            found.register(app)


def main() -> None:
    """Runs the command that the arguments of this process ask for."""
    find_commands()
    app()
