"""The measurements that come with weft, as rows of text. `reference/README.md` lists them."""

from __future__ import annotations

import csv
import os
from pathlib import Path

from weft.errors import Unsupported, nearest

_FOLDER = Path(__file__).parent / "reference"


def names() -> list[str]:
    """The names of all measurements."""
    return sorted(file.stem for file in _FOLDER.glob("*.csv"))


def measurements(name: str) -> list[dict[str, str]]:
    """The rows of `reference/<name>.csv`, by column name."""
    path = _FOLDER / f"{name}.csv"
    if not os.path.isfile(path):
        raise Unsupported(f"There are no measurements named {name!r}{nearest(name, names())}.")
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
