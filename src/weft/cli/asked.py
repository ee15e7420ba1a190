"""How commands read what they are asked about: amounts of bytes, and one or more machines."""

from __future__ import annotations

import re

from weft.errors import Unsupported
from weft.machine import Machine, load

_UNITS = {
    **{"": 1, "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9},
    **{"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30},
}
_SIZE = re.compile(r"([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([a-zA-Z]*)")


def sizes_of(text: str) -> list[float]:
    """`256MiB`, `1e9`, or several separated by commas."""
    found = []
    for part in text.split(","):
        match = _SIZE.fullmatch(part.strip())
        if match is None or match[2] not in _UNITS:
            raise Unsupported(f"{part.strip()!r} is not a size; write e.g. 256MiB, 1GB or 65536")
        found.append(float(match[1]) * _UNITS[match[2]])
        if not 0 <= found[-1] <= 1 << 60:
            raise Unsupported(f"a size must be at most 2^60 bytes, not {part.strip()}")
    return found


def size_of(text: str) -> int:
    """One amount of at least one byte, such as `256MiB`."""
    found = sizes_of(text)
    if len(found) != 1:
        raise Unsupported(f"give one size, e.g. 256MiB, not {text!r}")
    if found[0] < 1:
        raise Unsupported(f"a size must be at least 1 byte, not {text}")
    return round(found[0])


def machines_of(text: str) -> list[Machine]:
    """One machine or several, by names or paths of TOML files, separated by commas."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise Unsupported("name a machine, e.g. --machine mi300x, or two: --machine mi300x,h100")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise Unsupported(f"{twice[0]} is named twice; name each machine once")
    return [load(name) for name in names]
