"""The descriptions of this host: where they are stored, and how they are written.

`weft calibrate` measures this machine and writes `cpu.toml` atomically to the user's cache
directory, where `weft.machine.load("cpu")` finds it. Ranks with several compute threads have
descriptions of their own: `cpu-8-threads`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from math import inf
from pathlib import Path
from typing import Any

from weft.errors import Unsupported
from weft.files import write_atomically
from weft.machine.description import Machine

NAME = "cpu"


def cache() -> Path:
    """weft's folder in the user's cache directory; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "weft"


def name(threads: int) -> str:
    """The name of this host, with so many compute threads per rank."""
    return NAME if threads == 1 else f"{NAME}-{threads}-threads"


def named(text: str) -> bool:
    """Whether a text is a name of this host."""
    return text == NAME or re.fullmatch(rf"{NAME}-[1-9]\d*-threads", text) is not None


def path(host: str = NAME) -> Path:
    """The path of the description of this host, by its name, which may not exist yet."""
    return cache() / "machines" / f"{host}.toml"


def kept() -> list[str]:
    """The names of this host under which it is described."""
    found = (file.stem for file in path().parent.glob(f"{NAME}*.toml"))
    return sorted(stem for stem in found if named(stem))


def write(target: Path, text: str) -> Path:
    """Writes a file atomically and creates its folders. Readers see the old file or the new one."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unsupported(f"cannot write {target}: {error.strerror or error}") from error
    return write_atomically(target, [text])


def to_toml(machine: Machine, heading: str, sources: Mapping[str, str]) -> str:
    """The machine as TOML with a comment after every number.

    sources: the comment for a key (`launch.host`), or for all keys of a section (`launch`).
    """
    lines = [*(f"# {line}" for line in heading.splitlines()), f"title = {_text(machine.title)}"]
    for item in fields(machine):
        section = getattr(machine, item.name)
        if not is_dataclass(section):
            continue
        lines += ["", f"[{item.name}]"]
        for key in fields(section):
            value = getattr(section, key.name)
            if value is None or value == ():
                continue
            name = f"{item.name}.{key.name}"
            source = sources.get(name) or sources[item.name]
            lines += _entry(key.name, value, source)
    return "\n".join(lines) + "\n"


def _entry(key: str, value: Any, source: str) -> list[str]:
    if isinstance(value, tuple):
        rows = [f"    {_text(one)}," for one in value]
        return [f"{key} = [  # {source}", *rows, "]"]
    return [f"{key} = {_text(value)}  # {source}"]


def _text(value: Any) -> str:
    if is_dataclass(value):
        written = {item.name: getattr(value, item.name) for item in fields(value)}
        value = {key: one for key, one in written.items() if one not in (None, (), inf)}
    if isinstance(value, dict):
        pairs = (f"{key} = {_text(one)}" for key, one in value.items())
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    if isinstance(value, int):
        return str(value)
    return f"{value:.6g}"
