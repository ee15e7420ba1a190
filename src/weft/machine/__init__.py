"""Machines that weft can simulate: TOML descriptions, and measurements to check them against."""

from weft.machine.cluster import (
    Cluster,
    Inside,
    Network,
    Nics,
    cluster_from_table,
    cluster_names,
    load_cluster,
)
from weft.machine.description import (
    DTYPES,
    Compute,
    CopyEngines,
    Cores,
    DeviceMemory,
    HostCores,
    InSwitch,
    Launch,
    Links,
    Machine,
    Measured,
    Protocol,
    Saturation,
    Tile,
    Tiling,
)
from weft.machine.loading import from_table, load, names
from weft.machine.measurements import measurements

__all__ = [
    "DTYPES",
    "Cluster",
    "Compute",
    "CopyEngines",
    "Cores",
    "DeviceMemory",
    "HostCores",
    "InSwitch",
    "Inside",
    "Launch",
    "Links",
    "Machine",
    "Measured",
    "Network",
    "Nics",
    "Protocol",
    "Saturation",
    "Tile",
    "Tiling",
    "cluster_from_table",
    "cluster_names",
    "from_table",
    "load",
    "load_cluster",
    "measurements",
    "names",
]
