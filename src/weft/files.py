"""Reads and writes files. Writing is atomic: readers never see half a file, and failures leave
nothing behind.

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

_MOST = 64 << 20
"""Characters of a file of a user: a device such as /dev/zero has no end."""


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a user's file. Raises `Unsupported` unless it can be read."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_MOST + 1)
    except OSError as error:
        raise Unsupported(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise Unsupported(f"{path} is not a text file in UTF-8") from error
    if len(text) > _MOST:
        raise Unsupported(f"{path} cannot be read: it is longer than {_MOST >> 20} MiB")
    return text


def check_targets(*paths: str | os.PathLike[str] | None) -> None:
    """Raises unless all of the paths that are given can be written, to different files. Called
    before long work whose results would be lost."""
    known: set[str] = set()
    for path in paths:
        if path is None:
            continue
        check_target(path)
        real = os.path.realpath(path)
        if real in known:
            raise Unsupported(f"cannot write {path} twice; give every output a file of its own")
        known.add(real)


def check_target(path: str | os.PathLike[str]) -> None:
    """Raises unless the path can be written. Called before long work whose result would be lost."""
    target = Path(path)
    if os.path.isdir(target):
        raise Unsupported(f"cannot write {target}: it is a folder")
    if os.path.lexists(target) and not os.path.isfile(target):
        raise Unsupported(f"cannot write {target}: it is a device, a pipe or a broken link")
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
    target = Path(os.path.realpath(path))  # a link stays one
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
        raise Unsupported(f"cannot write {path}: {error.strerror or error}") from error
    return Path(path)
