"""The cost of tasks that only move data through a device's memory: reduce, permute, lookup."""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import Unsupported
from weft.machine import Machine


@dataclass(frozen=True)
class MemoryCost:
    """`seconds` = `launch` + `memory_seconds`, with `bytes` of traffic in the latter."""

    seconds: float
    launch: float
    memory_seconds: float
    bytes: float


def checked_units(machine: Machine, units: int | None) -> int:
    """The number of compute units; None is all of them."""
    total = machine.compute.units
    if units is None:
        return total
    if not 1 <= units <= total:
        raise Unsupported(f"{machine.name} has 1 to {total} compute units to give, not {units}.")
    return units


def bandwidth_of(machine: Machine, units: int | None = None) -> float:
    """The memory bandwidth that this many compute units reach together.

    Few units cannot make enough requests. All units make too many, which slows the memory, so that
    the others become faster if a few are taken away.
    """
    memory = machine.memory
    units = checked_units(machine, units)
    relief = min(1.0, (machine.compute.units - units) / memory.crowding_units)
    crowded = memory.bandwidth * (1.0 + memory.crowding * relief)
    return min(crowded, memory.peak_bandwidth, units * memory.unit_bandwidth)


def memory_bound(
    machine: Machine, bytes_read: float, bytes_written: float, *, units: int | None = None
) -> MemoryCost:
    """The cost of a kernel that reads and writes this many bytes and computes little."""
    if bytes_read < 0 or bytes_written < 0:
        raise Unsupported(f"A task cannot move {min(bytes_read, bytes_written)} bytes.")
    total = bytes_read + bytes_written
    rate = bandwidth_of(machine, units)
    if total == 0:
        return MemoryCost(0.0, 0.0, 0.0, 0.0)
    moving = machine.memory.latency + total / rate
    return MemoryCost(machine.launch.kernel + moving, machine.launch.kernel, moving, total)
