"""The measurements that come with weft, as rows of text. `reference/README.md` lists them."""

from __future__ import annotations

import csv
from pathlib import Path

from weft.errors import Unsupported, nearest

_FOLDER = Path(__file__).parent / "reference"


def measurements(name: str) -> list[dict[str, str]]:
    """The rows of `reference/<name>.csv`, by column name."""
    path = _FOLDER / f"{name}.csv"
    if not path.is_file():
        known = sorted(file.stem for file in _FOLDER.glob("*.csv"))
        raise Unsupported(f"There are no measurements named {name!r}{nearest(name, known)}.")
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
