"""Machines weft can simulate: TOML descriptions, and the measurements they are checked against."""

from weft.machine.description import (
    DTYPES,
    Compute,
    Cores,
    Engines,
    Host,
    InSwitch,
    Launch,
    Links,
    Machine,
    Measured,
    Memory,
    Protocol,
    Saturation,
    Tile,
    Tiling,
)
from weft.machine.loading import from_table, load, names
from weft.machine.measurements import measurements

__all__ = [
    "DTYPES",
    "Compute",
    "Cores",
    "Engines",
    "Host",
    "InSwitch",
    "Launch",
    "Links",
    "Machine",
    "Measured",
    "Memory",
    "Protocol",
    "Saturation",
    "Tile",
    "Tiling",
    "from_table",
    "load",
    "measurements",
    "names",
]
