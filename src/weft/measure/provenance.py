"""Where a result comes from: the day, the machine, the versions and the commit."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

from weft.select.store import this_machine


@dataclass(frozen=True)
class Provenance:
    """When, where and with what something was measured. `commit` is None outside of a checkout."""

    date: str
    machine: str
    python: str
    torch: str
    commit: str | None


def provenance(folder: Path) -> Provenance:
    """The provenance of what is measured now. The commit is that of the checkout of `folder`."""
    return Provenance(
        datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        this_machine(),
        platform.python_version(),
        importlib.metadata.version("torch"),
        _commit(folder),
    )


def _commit(folder: Path) -> str | None:
    """The short hash of the checked out commit, with `+` if tracked Python or C++ files differ."""
    try:
        found = _git(folder, "rev-parse", "--short=10", "HEAD")
        changed = _git(
            folder, "status", "--porcelain", "--untracked-files=no", "--", "*.py", "*.cpp"
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found + ("+" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=folder, check=True, capture_output=True, text=True, timeout=10
    )
    return done.stdout.strip()
