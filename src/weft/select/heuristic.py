"""Chooses by the rule: a time for each candidate from static sizes and a machine, and the least.

The rule itself is native/rule.cpp, which is short and meant to be read; docs/heuristic.md derives
its terms. Nothing is simulated, and one rule serves all machines: what differs is their numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import inf

from weft.machine import DTYPES, Machine
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.plan.gathering import default_depth
from weft.schedule import Schedule
from weft.select import _rule
from weft.select.numbers import numbers

_ENGINES = ("dma", "cores", "direct")
_FUSIONS = ("fused", "unfused", "adaptive")
_ADAPTIVE = Schedule.parse("adaptive")
_SERIAL = Schedule.parse("serial@dma")
SERIAL = (_SERIAL, Schedule.parse("serial@cores"))

MARGIN = 0.01
"""What overlapping must promise over serial: less is within what the rule may err by."""
ADAPTIVE_MARGIN = 0.12
"""The same for adaptive, whose pieces depend on arrivals, so that the rule has only their mean."""

PAPER = tuple(
    Schedule.parse(name)
    for name in ("uniform-fused-1d", "hetero-fused-1d", "hetero-unfused-1d", "uniform-fused-2d")
)
"""FiCCO's own four schedules."""


@dataclass(frozen=True)
class Choice:
    """A schedule, in words why it is this one, and which serial it is to be compared with."""

    schedule: Schedule
    why: str
    serial: Schedule = _SERIAL

    @cached_property
    def told(self) -> tuple[str, str]:
        """The choice as a header tells it."""
        return self.schedule.name, self.why


@lru_cache(maxsize=4096)
def choose(machine: Machine, operation: AllGatherMatmul) -> Choice:
    """The schedule for which the rule gives the least time."""
    seconds = estimates(machine, operation)
    best = least(seconds)
    serial = min(SERIAL, key=lambda schedule: seconds.get(schedule, inf))
    return Choice(best, _why(machine, seconds, best), serial)


def least(seconds: Mapping[Schedule, float]) -> Schedule:
    """The candidate with the least time, among those that promise enough over serial."""
    serial = _serial_seconds(seconds)
    by_time = sorted(seconds, key=seconds.__getitem__)
    for schedule in by_time:
        margin = ADAPTIVE_MARGIN if schedule.fusion == "adaptive" else MARGIN
        if schedule.serial or seconds[schedule] < serial * (1.0 - margin):
            return schedule
    return by_time[0]


def _serial_seconds(seconds: Mapping[Schedule, float]) -> float:
    return min((seconds[schedule] for schedule in SERIAL if schedule in seconds), default=inf)


def estimates(
    machine: Machine, operation: AllGatherMatmul, schedules: Sequence[Schedule] | None = None
) -> dict[Schedule, float]:
    """The seconds that the rule gives the candidates (by default `Schedule.space`)."""
    world, rows, k = operation.world, max(operation.rows), operation.k
    columns = max(operation.columns, key=sum)
    if schedules is None:
        schedules = candidates(world)
    if not (rows and k and sum(columns)):
        # With nothing to multiply there is nothing to hide anything behind.
        return {schedule: float(not schedule.serial) for schedule in schedules}
    chunks = default_depth(operation, _ADAPTIVE)
    points = [_candidate(schedule, world, chunks) for schedule in schedules]
    seconds = numbers(machine, world, operation.dtype).seconds(
        points, world, operation.m, rows, columns, k
    )
    return dict(zip(schedules, seconds, strict=True))


@dataclass(frozen=True)
class _Sized:
    world: int


@lru_cache(maxsize=64)
def candidates(world: int) -> tuple[Schedule, ...]:
    """The schedules to choose from; which they are depends on the world alone."""
    return tuple(Schedule.space(_Sized(world)))


@lru_cache(maxsize=4096)
def _candidate(schedule: Schedule, world: int, adaptive_chunks: int) -> _rule.Candidate:
    depth = schedule.depth
    if depth is None:
        depth = adaptive_chunks if schedule.fusion == "adaptive" else world
        if schedule.fusion == "adaptive" and schedule.engine == "direct":
            depth = 1
    return _rule.Candidate(
        engine=_ENGINES.index(schedule.engine),
        fusion=_FUSIONS.index(schedule.fusion),
        serial=schedule.serial or world == 1,
        one_peer=schedule.pattern == "peer",
        columns=schedule.cut == "columns",
        uniform=schedule.start == "uniform",
        depth=max(1, depth),
    )


def _why(machine: Machine, seconds: Mapping[Schedule, float], best: Schedule) -> str:
    if len(seconds) == 1:
        return "one rank has nothing to overlap"
    serial = _serial_seconds(seconds)
    if best.serial:
        return (
            f"by the rule for {machine.name}: no schedule is sure to hide more than it costs to "
            f"cut {serial * 1e6:.0f} us of work"
        )
    return (
        f"by the rule for {machine.name}: {seconds[best] * 1e6:.0f} us against "
        f"{serial * 1e6:.0f} us for serial"
    )


def paper(machine: Machine, operation: AllGatherMatmul) -> Schedule:
    """A rule of the kind that FiCCO describes, over its four schedules: M against K, the chunk's
    op-to-byte ratio against the machine's balance, communication against compute. Our reading of
    what its features must be; it is here so that the rule above has something to stand beside."""
    uniform_1d, hetero_fused, hetero_unfused, uniform_2d = PAPER
    world, m, k = operation.world, operation.m, operation.k
    n = sum(max(operation.columns, key=sum))
    if m < k:
        return uniform_2d
    element = DTYPES[operation.dtype][0]
    rate = machine.compute.rate[operation.dtype]
    balance = rate / machine.memory.bandwidth
    rows = max(1, m // world**2)
    intensity = 2.0 * rows * n * k / (element * (rows * k + n * k + rows * n))
    if intensity > 2.0 * balance:
        return hetero_unfused
    compute = 2.0 * m * n * k / rate
    moved = (m - max(operation.rows)) * k * element
    communication = moved / machine.links.out_of_device(max(2, world))
    return uniform_1d if communication > 2.0 * compute else hetero_fused
