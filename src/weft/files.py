"""Writes files atomically: readers never see half a file, and failures leave nothing behind.

Here and elsewhere, `os.path` looks whether a user's file is there: `pathlib` raises where a name is
too long to be one.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from weft.errors import Unsupported


def check_target(path: str | os.PathLike[str]) -> None:
    """Raises unless the path can be written. Called before long work whose result would be lost."""
    target = Path(path)
    if os.path.isdir(target):
        raise Unsupported(f"cannot write {target}: it is a folder")
    folder = target.parent
    if not os.path.isdir(folder):
        raise Unsupported(f"cannot write {target}: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise Unsupported(f"cannot write {target}: {folder} cannot be written to")


def write_atomically(path: str | os.PathLike[str], parts: Iterable[str]) -> Path:
    """Writes the parts to a temporary file next to `path`, then renames it to `path`.

    The temporary file is in the same folder, because only a rename within one file system is
    atomic. `tempfile` is not used, because other users could not read its files.
    """
    target = Path(path)
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        try:
            with open(beside, "x", encoding="utf-8", newline="\n") as file:
                file.writelines(parts)
            os.replace(beside, target)
        except BaseException:
            with suppress(OSError):
                beside.unlink()
            raise
    except OSError as error:
        raise Unsupported(f"cannot write {target}: {error.strerror or error}") from error
    return target
