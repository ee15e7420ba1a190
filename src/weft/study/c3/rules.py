"""Rules for C3: what to do, from sizes and the machine's numbers only, before anything runs.

Each rule is a closed form, cheap enough for a runtime to evaluate at every launch:

    launch first  the kernel with the fewest workgroups, which leaves most units to the other
    reserve       the power of two with the shortest estimate
    trim          a memory-bound GEMM does not use the units that only crowd its memory
    strategy      the shortest estimate of all: copy engines if the message is large enough for
                  them; cores, or serial, if the commands of engines would take longer

An estimate is the longer one of GEMM and collective, each timed alone on its units, plus what both
lose while they run at the same time, by contention, and by memory bandwidth.

`simulated` compares the rules with the best, by trying all alternatives.
"""

from __future__ import annotations

from weft.machine import Machine
from weft.plan.concurrent import SUMMING, Collective, Concurrent
from weft.simulate.contention import contention
from weft.simulate.cost import bandwidth_of, collective, gemm
from weft.simulate.cost.gemm import GemmCost
from weft.strategy import Driver, Strategy

SMALLEST_SHARE = 8
"""The fewest units that are reserved: one per die of MI300X, the granularity of its masks."""


def needed_units(machine: Machine, kind: Collective) -> int:
    """The compute units with which a core-driven collective saturates its links."""
    cores = machine.cores
    return cores.all_to_all_units if kind == "all_to_all" else cores.all_gather_units


def partitions(machine: Machine) -> list[int]:
    """The powers of two that can be reserved while the GEMM keeps at least half of the units."""
    units, sizes = SMALLEST_SHARE, []
    while units <= machine.compute.units // 2:
        sizes.append(units)
        units *= 2
    return sizes


def num_workgroups(machine: Machine, operation: Concurrent) -> int:
    """The number of tiles of the GEMM. Each is a workgroup."""
    cost = _gemm(machine, operation)
    rows, columns = cost.tile
    if not cost.seconds:
        return 0
    return -(-operation.m // rows) * -(-operation.n // columns) * cost.split_k


def is_memory_bound(machine: Machine, operation: Concurrent) -> bool:
    """Whether memory bounds the GEMM alone, not arithmetic."""
    cost = _gemm(machine, operation)
    return cost.memory_seconds > cost.compute_seconds


def first(machine: Machine, operation: Concurrent) -> Strategy:
    """Which of the two to launch first."""
    fewer = needed_units(machine, operation.collective) < num_workgroups(machine, operation)
    return Strategy.of("prioritized" if fewer else "concurrent")


def reserve(machine: Machine, operation: Concurrent) -> Strategy:
    """The number of units to reserve for a core-driven collective."""
    sizes = partitions(machine)
    best = min(sizes, key=lambda units: _partitioned(machine, operation, units))
    return Strategy.of("partitioned", best)


def trim(machine: Machine, operation: Concurrent) -> Strategy:
    """The number of units to take from the GEMM when copy engines move the collective."""
    if is_memory_bound(machine, operation) and machine.memory.crowding > 0.0:
        return Strategy.of("dma+trimmed", machine.memory.crowding_units)
    return Strategy.of("dma")


def choose(machine: Machine, operation: Concurrent) -> Strategy:
    """The strategy with the shortest estimate, serial included."""
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
    """The smallest power of two, in bytes, from which on copy engines are not slower than cores."""
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
    """The GEMM has the units that the collective leaves, and all units after it has ended."""
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
    """The time of GEMM and collective together. Both are slower while the shorter one runs."""
    multiplying = _gemm(machine, operation, units).seconds
    slower = _slower(machine, operation, engine, units)
    return max(multiplying, moving) + (slower - 1.0) * min(multiplying, moving)


def _slower(machine: Machine, operation: Concurrent, engine: Driver, units: int) -> float:
    """The slowdown of both while they run at the same time."""
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
