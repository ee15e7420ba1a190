"""A machine file to edit, made from one that is there: the same numbers, each with what it means.

Meanings are the comments in `description.py`, so that they are written once.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from functools import lru_cache
from types import ModuleType
from typing import get_args, get_type_hints

from weft.machine import description, server

_SECTION = re.compile(r"\[\[?([a-z_.]+)\]\]?")
_ENTRY = re.compile(r"([a-z_0-9]+) = ([^#]*)(?:# *(.*))?$")

HEAD = """\
# A machine of your own, begun from {name} ({title}).
# Change what you know, leave the rest, then run: weft machine check {file}
# Use it by its path: weft explore --machine {file} --m 8192 --n 8192 --k 8192
#
# SI units: seconds, bytes, bytes per second, flops per second (1 GB/s is 1e9, 1 us is 1e-6).
# Above each number stands what it means, behind it where {name}'s comes from. What matters most:
# compute.units, compute.rate, memory.bandwidth, links.* and cores.protocols; or, of a CPU
# server, all of [server].
"""


def template(text: str, name: str, title: str, file: str) -> str:
    """The text of a machine file with a heading to start from and a meaning for every key."""
    lines, section = [HEAD.format(name=name, title=title, file=file).rstrip()], ""
    about = [line for line in text.splitlines() if line.startswith("#")]
    if about:
        lines += [
            "#",
            f"# What {name} says of its numbers:",
            *(f"#   {a[1:].strip()}" for a in about),
        ]
    seen: set[str] = set()
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        if found := _SECTION.match(line):
            section = found[1]
            lines.append(line)
            if meanings().get(section) and section not in seen:
                lines.append(f"# {meanings()[section]}")
            seen.add(section)
            continue
        entry = _ENTRY.match(line)
        if entry is None:
            lines.append(line)
            continue
        key = f"{section}.{entry[1]}" if section else entry[1]
        meaning = meanings().get(key)
        if meaning and key not in seen:
            lines.append(f"# {meaning}")
        seen.add(key)
        source = f"# {name}: {entry[3]}" if entry[3] else ""
        lines.append(f"{entry[1]} = {entry[2].strip()} {source}".rstrip())
    return "\n".join(lines).rstrip() + "\n"


@lru_cache
def meanings() -> dict[str, str]:
    """What every key of a machine file means, e.g. `links.latency`."""
    said = _comments()
    found: dict[str, str] = {}

    def walk(kind: type, prefix: str) -> None:
        for name, hint in get_type_hints(kind).items():
            key = prefix + name
            if said.get((kind.__name__, name)):
                found[key] = said[kind.__name__, name]
            for inner in (hint, *get_args(hint)):
                if isinstance(inner, type) and inner.__module__ == description.__name__:
                    walk(inner, key + ".")

    walk(description.Machine, "")
    walk(server.Server, "server.")
    return found


def _comments() -> dict[tuple[str, str], str]:
    """By class and field, the comment behind the field."""
    return {**_comments_in(description), **_comments_in(server)}


def _comments_in(module: ModuleType) -> dict[tuple[str, str], str]:
    source = textwrap.dedent(inspect.getsource(module))
    lines = source.splitlines()
    found = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                _, mark, comment = lines[item.lineno - 1].partition("  # ")
                if mark:
                    found[node.name, item.target.id] = comment.strip()
    return found
