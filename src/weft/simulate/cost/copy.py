"""The cost of one copy between devices or inside one, by a copy engine or by compute units."""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import Unsupported
from weft.machine import Machine
from weft.simulate.cost.memory import bandwidth_of


@dataclass(frozen=True)
class CopyCost:
    """`seconds` = `command` + `bytes` / `rate` + `completion`.

    `command`: the time before bytes flow. `rate`: that of engine and link if nothing else uses
    them. `completion`: the time until a waiting task knows the end. `traffic`: the memory traffic
    at *each* end. `units`: the compute units that are held meanwhile.
    """

    seconds: float
    command: float
    bytes: float
    rate: float
    completion: float
    traffic: float
    units: int


def copy(
    machine: Machine,
    bytes: float,
    *,
    rows: int = 1,
    engine: str = "dma",
    prelaunched: bool = False,
    remote: bool = True,
) -> CopyCost:
    """The cost of copying `bytes` in `rows` equal runs, to one peer or inside the device.

    `prelaunched`: the command waits in the engine's queue, and one memory write releases it.
    """
    if bytes < 0 or rows < 1:
        raise Unsupported(f"A copy cannot have {bytes} bytes in {rows} rows.")
    if engine not in ("dma", "cores"):
        raise Unsupported(f"A copy is done by dma or cores, not {engine}.")
    if bytes == 0:
        return CopyCost(0.0, 0.0, 0.0, machine.links.to_one_peer(), 0.0, 0.0, 0)
    if engine == "dma":
        return _by_engine(machine, float(bytes), rows, prelaunched, remote)
    return _by_cores(machine, float(bytes), remote)


def _by_engine(
    machine: Machine, size: float, rows: int, prelaunched: bool, remote: bool
) -> CopyCost:
    engines = machine.engines
    reach = min(engines.bandwidth, machine.links.to_one_peer())
    rate = reach if remote else engines.local_bandwidth
    # Every further row costs the engine some time, so short rows never reach the link's rate.
    if rows > 1:
        rate = size / (size / rate + (rows - 1) * engines.row)
    start = engines.release if prelaunched else engines.command + engines.schedule
    command = start + engines.packet
    seconds = command + size / rate + engines.completion
    traffic = size * engines.memory_bytes_per_byte
    return CopyCost(seconds, command, size, rate, engines.completion, traffic, 0)


def _by_cores(machine: Machine, size: float, remote: bool) -> CopyCost:
    cores, launch = machine.cores, machine.launch
    units = min(cores.copy_units, machine.compute.units)
    inside = bandwidth_of(machine, units) / 2.0  # every byte is read and written
    rate = min(machine.links.to_one_peer(), inside) if remote else inside
    command = launch.kernel + (machine.links.latency if remote else 0.0)
    completion = launch.signal + launch.poll
    seconds = command + size / rate + completion
    traffic = size * cores.memory_bytes_per_byte
    return CopyCost(seconds, command, size, rate, completion, traffic, units)
