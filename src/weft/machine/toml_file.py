"""Reads TOML files of users. Errors say in one sentence what is wrong with a file."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from weft.errors import Unsupported
from weft.files import read_text


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    text = read_text(path)
    try:
        return tomllib.loads(text)
    except ValueError as error:  # also of numbers with thousands of digits
        raise Unsupported(f"{path.name} is not a TOML file: {error}.") from error
    except RecursionError:
        raise Unsupported(f"{path.name} nests its values too deeply.") from None
