"""Reads TOML files of users. Errors say in one sentence what is wrong with a file."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from weft.errors import Unsupported


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Unsupported(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:  # also of numbers with thousands of digits, and of other encodings
        raise Unsupported(f"{path.name} is not a TOML file: {error}.") from error
    except RecursionError:
        raise Unsupported(f"{path.name} nests its values too deeply.") from None
