"""The command `weft`. It is outside of the package, because importing weft imports torch, which
takes seconds, and `weft --version` needs neither."""

from __future__ import annotations

import sys


def main() -> None:
    """Answers `weft --version`, and leaves everything else to `weft.cli`."""
    if sys.argv[1:] == ["--version"]:
        from importlib.metadata import version

        print(f"weft {version('weft')}")
        return
    from weft.cli import main as commands

    commands()
