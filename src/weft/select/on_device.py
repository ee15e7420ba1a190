"""`schedule="auto"` for tensors on a device: by the rule, if weft has a description of the device.

The guard does not watch these calls: they are enqueued, so the host cannot time them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from weft.machine import Machine, load, names
from weft.select import between_machines, heuristic
from weft.select.heuristic import Choice


def choose(device: torch.device, operation: Any) -> Choice:
    """The schedule of an operation on a device."""
    name = device_name(device)
    machine = described(name)
    if machine is None:
        return between_machines.choose(operation, f"weft has no description of {name}")
    return heuristic.choose(machine, operation)


def device_name(device: torch.device) -> str:
    """The name of a device as its maker gives it, such as "NVIDIA H100 80GB HBM3"."""
    module = torch.get_device_module(device)
    return (
        str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type
    )


@lru_cache(maxsize=64)
def described(name: str) -> Machine | None:
    """The description of the machine whose name is part of a device's name."""
    plain = name.lower().replace(" ", "").replace("-", "")
    found = [machine for machine in names() if machine in plain]
    return load(max(found, key=len)) if found else None
