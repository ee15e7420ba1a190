"""The command `weft`. It is outside of the package, because importing weft imports torch, which
takes seconds, and `weft --version` needs neither."""

from __future__ import annotations

import json
import os
import signal
import sys


def main() -> None:
    """Answers `weft --version`, and leaves everything else to `weft.cli`."""
    if sys.argv[1:] == ["--version"]:
        from importlib.metadata import version

        print(f"weft {version('weft')}")
        return
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)
    try:
        from weft import cli

        cli.find_commands()
    except KeyboardInterrupt:
        _stop()
    except Exception as error:
        if not _is_of_weft(error):
            raise
        if "--json" in sys.argv:
            print(json.dumps({"error": str(error)}))
        print(f"weft: {error}", file=sys.stderr)
        sys.exit(2)
    finally:
        signal.signal(signal.SIGINT, before)
    cli.main()


def _stop(*_: object) -> None:
    """Ctrl-C while the imports run, where an exception may become any other."""
    os.write(2, b"weft: stopped\n")
    os._exit(130)


def _is_of_weft(error: Exception) -> bool:
    """Whether the import failed on purpose, as it does for a plugin that cannot be imported."""
    errors = sys.modules.get("weft.errors")
    return errors is not None and isinstance(error, errors.Error)
