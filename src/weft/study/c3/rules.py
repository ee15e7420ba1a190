"""Rules for C3: what to do, from the sizes and the machine's numbers alone, before anything runs.

Each answers one question in closed form, so that a runtime can ask it at every launch:

    launch first  the kernel with the fewest workgroups: it leaves most of the machine to the other
    reserve       the power of two whose estimate is shortest
    trim          a memory-bound GEMM goes without the units that only crowd its memory
    strategy      the shortest estimate of all. Copy engines, where the message is large enough for
                  them; cores, or serial, where commanding the engines would take longer

An estimate is the longer of both, each timed alone on the units it has, and what both lose while
they run at once: by contention, and by memory that cannot serve both.

How far the rules are from the best is found by trying everything else (`simulated`).
"""

from __future__ import annotations

from weft.machine import Machine
from weft.plan.concurrent import SUMMING, Collective, Concurrent
from weft.simulate.contention import contention
from weft.simulate.cost import bandwidth_of, collective, gemm
from weft.simulate.cost.gemm import GemmCost
from weft.strategy import Driver, Strategy

SMALLEST_SHARE = 8
"""No fewer units are reserved: one of each die of MI300X, which is as fine as masks go there."""


def needed_units(machine: Machine, kind: Collective) -> int:
    """Compute units with which a core-driven collective saturates its links."""
    cores = machine.cores
    return cores.all_to_all_units if kind == "all_to_all" else cores.all_gather_units


def partitions(machine: Machine) -> list[int]:
    """The powers of two that can be reserved and leave the GEMM at least half of the units."""
    units, sizes = SMALLEST_SHARE, []
    while units <= machine.compute.units // 2:
        sizes.append(units)
        units *= 2
    return sizes


def num_workgroups(machine: Machine, operation: Concurrent) -> int:
    """Tiles of the GEMM, a workgroup each."""
    cost = _gemm(machine, operation)
    rows, columns = cost.tile
    if not cost.seconds:
        return 0
    return -(-operation.m // rows) * -(-operation.n // columns) * cost.split_k


def is_memory_bound(machine: Machine, operation: Concurrent) -> bool:
    """Whether the GEMM alone waits for memory rather than for arithmetic."""
    cost = _gemm(machine, operation)
    return cost.memory_seconds > cost.compute_seconds


def first(machine: Machine, operation: Concurrent) -> Strategy:
    """Which of the two to launch first."""
    fewer = needed_units(machine, operation.collective) < num_workgroups(machine, operation)
    return Strategy.of("prioritized" if fewer else "concurrent")


def reserve(machine: Machine, operation: Concurrent) -> Strategy:
    """How many units to set aside for a core-driven collective."""
    sizes = partitions(machine)
    best = min(sizes, key=lambda units: _partitioned(machine, operation, units))
    return Strategy.of("partitioned", best)


def trim(machine: Machine, operation: Concurrent) -> Strategy:
    """Whether to take units from the GEMM beside copy engines, and how many."""
    if is_memory_bound(machine, operation) and machine.memory.crowding > 0.0:
        return Strategy.of("dma+trimmed", machine.memory.crowding_units)
    return Strategy.of("dma")


def choose(machine: Machine, operation: Concurrent) -> Strategy:
    """The strategy that these estimates say is shortest, serial included."""
    reserved = reserve(machine, operation)
    estimates = {
        Strategy.of("serial"): _serial(machine, operation),
        first(machine, operation): _prioritized(machine, operation),
        reserved: _partitioned(machine, operation, reserved.reserved),
    }
    if operation.collective not in SUMMING:
        trimmed = trim(machine, operation)
        estimates[trimmed] = _by_engines(machine, operation, trimmed.trimmed)
    return min(estimates, key=lambda strategy: estimates[strategy])


def dma_pays_from(machine: Machine, kind: Collective, world: int) -> int:
    """The smallest power of two of bytes at which copy engines are no slower than cores, alone."""
    for power in range(10, 41):
        cores = collective(machine, kind, 1 << power, world)
        engines = collective(machine, kind, 1 << power, world, driver="dma", variant="pcpy")
        if engines <= cores:
            return 1 << power
    return 1 << 41


def _serial(machine: Machine, operation: Concurrent) -> float:
    alone = min(_collective(machine, operation, "cores"), _collective(machine, operation, "dma"))
    return _gemm(machine, operation).seconds + alone


def _prioritized(machine: Machine, operation: Concurrent) -> float:
    """The GEMM has what the collective leaves, and all of it once the collective is over."""
    if first(machine, operation).base == "concurrent":
        return _serial(machine, operation)
    left = machine.compute.units - needed_units(machine, operation.collective)
    moving = _collective(machine, operation, "cores")
    slowed = _gemm(machine, operation, left).seconds
    slower = _slower(machine, operation, "cores", left)
    if slowed <= moving:
        return moving + (slower - 1.0) * slowed
    return slower * moving + (1.0 - moving / slowed) * _gemm(machine, operation).seconds


def _partitioned(machine: Machine, operation: Concurrent, units: int) -> float:
    moving = _collective(machine, operation, "cores", units)
    return _at_once(machine, operation, "cores", machine.compute.units - units, moving)


def _by_engines(machine: Machine, operation: Concurrent, trimmed: int) -> float:
    moving = _collective(machine, operation, "dma")
    return _at_once(machine, operation, "dma", machine.compute.units - trimmed, moving)


def _at_once(
    machine: Machine, operation: Concurrent, engine: Driver, units: int, moving: float
) -> float:
    """GEMM and collective from launch to end, each slowed for as long as the shorter one runs."""
    multiplying = _gemm(machine, operation, units).seconds
    slower = _slower(machine, operation, engine, units)
    return max(multiplying, moving) + (slower - 1.0) * min(multiplying, moving)


def _slower(machine: Machine, operation: Concurrent, engine: Driver, units: int) -> float:
    """How many times as long both take while they run at once."""
    side = machine.engines if engine == "dma" else machine.cores
    sent = sum(operation.num_bytes(0, peer) for peer in range(operation.world))
    through = 2.0 * side.memory_bytes_per_byte * sent  # in and out of a device
    cost = _gemm(machine, operation, units)
    if not cost.seconds or not sent:
        return 1.0
    asked = cost.bytes / cost.seconds + through / _collective(machine, operation, engine)
    slower = contention(machine, engine, operation.world).slows_bytes()
    return slower * max(1.0, asked / bandwidth_of(machine, units))


def _collective(
    machine: Machine, operation: Concurrent, engine: Driver, units: int | None = None
) -> float:
    return collective(
        machine,
        operation.collective,
        operation.total_bytes,
        operation.world,
        driver=engine,
        variant="pcpy" if engine == "dma" else None,
        units=units,
    )


def _gemm(machine: Machine, operation: Concurrent, units: int | None = None) -> GemmCost:
    shape = (operation.m, operation.n, operation.k)
    return gemm(machine, *shape, operation.dtype, units=units)
