"""Chooses by the rule: a time for each candidate from static sizes and a machine, and the least.

The rule itself is native/rule.cpp, which is short and meant to be read; docs/heuristic.md derives
its terms. Nothing is simulated, and one rule serves all machines: what differs is their numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import inf
from typing import Any

from weft.machine import DTYPES, Machine
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.schedule import Schedule
from weft.select import _rule
from weft.select.numbers import numbers
from weft.select.sizes import CONTRACT, sizes_of

_ENGINES = ("dma", "cores", "direct")
_FUSIONS = ("fused", "unfused", "adaptive")
_SERIAL = Schedule.parse("serial@dma")
SERIAL = (_SERIAL, Schedule.parse("serial@cores"))
_FEW_CHUNKS = Schedule.parse("adaptive:4@dma")
"""Beside the candidates of `Schedule.space`: adaptive with few chunks, where each costs much."""

MARGIN = 0.01
"""What overlapping must promise over serial: less is within what the rule may err by."""
ADAPTIVE_MARGIN = 0.12
"""The same for adaptive, whose pieces depend on arrivals, so that the rule has only their mean."""
RIVAL = 1.3
"""Candidates of another kind that the rule puts within this of its choice are named with it, for
a guard to try."""

MOST_RIVALS = 2

PAPER = tuple(
    Schedule.parse(name)
    for name in ("uniform-fused-1d", "hetero-fused-1d", "hetero-unfused-1d", "uniform-fused-2d")
)
"""FiCCO's own four schedules."""


@dataclass(frozen=True)
class Choice:
    """A schedule, in words why it is this one, and what is to be tried against it: the best
    serial, and rivals of other kinds that are not far behind."""

    schedule: Schedule
    why: str
    serial: Schedule = _SERIAL
    rivals: tuple[Schedule, ...] = field(default=())

    @cached_property
    def told(self) -> tuple[str, str]:
        """The choice as a header tells it."""
        return self.schedule.name, self.why


@lru_cache(maxsize=4096)
def choose(machine: Machine, operation: Any) -> Choice:
    """The schedule for which the rule gives the least time."""
    seconds = estimates(machine, operation)
    best = least(seconds)
    serial = min(SERIAL, key=lambda schedule: seconds.get(schedule, inf))
    return Choice(best, _why(machine, seconds, best), serial, _rivals(seconds, best))


def least(seconds: Mapping[Schedule, float]) -> Schedule:
    """The candidate with the least time, among those that promise enough over serial."""
    serial = _serial_seconds(seconds)
    by_time = sorted(seconds, key=seconds.__getitem__)
    for schedule in by_time:
        if schedule.serial or seconds[schedule] < serial * (1.0 - _margin(schedule)):
            return schedule
    return by_time[0]


def _margin(schedule: Schedule) -> float:
    if schedule.engine == "direct":
        return 0.0  # nothing is moved, so that nothing can come late
    return ADAPTIVE_MARGIN if schedule.fusion == "adaptive" else MARGIN


def _serial_seconds(seconds: Mapping[Schedule, float]) -> float:
    return min((seconds[schedule] for schedule in SERIAL if schedule in seconds), default=inf)


def _kind(schedule: Schedule) -> str:
    if schedule.serial:
        return "serial"
    if schedule.engine == "direct":
        return "in place"
    return "adaptive" if schedule.fusion == "adaptive" else "cut"


def _rivals(seconds: Mapping[Schedule, float], best: Schedule) -> tuple[Schedule, ...]:
    """The least of every other kind, where it is near: in place, adaptive, cut into fixed steps.
    What is of one kind differs by less, and the rule tells it apart well."""
    most = RIVAL * seconds[best]
    leading: dict[str, Schedule] = {}
    for schedule in sorted(seconds, key=seconds.__getitem__):
        if seconds[schedule] <= most:
            leading.setdefault(_kind(schedule), schedule)
    leading.pop(_kind(best), None)
    leading.pop("serial", None)
    return tuple(leading.values())[:MOST_RIVALS]


def estimates(
    machine: Machine, operation: Any, schedules: Sequence[Schedule] | None = None
) -> dict[Schedule, float]:
    """The seconds that the rule gives the candidates (by default all that there are)."""
    sizes = sizes_of(operation)
    if schedules is None:
        schedules = candidates(sizes.world, sizes.form == CONTRACT)
    if min(sizes.rows, sizes.k, sum(sizes.columns)) <= 0:
        # With nothing to multiply there is nothing to hide anything behind.
        return {schedule: float(not schedule.serial) for schedule in schedules}
    seconds = numbers(machine, sizes.world, sizes.dtype).seconds(
        _points(tuple(schedules), sizes.world, sizes.cut, sizes.adaptive_cut),
        sizes.form,
        sizes.world,
        sizes.m,
        sizes.rows,
        sizes.columns,
        sizes.k,
    )
    return dict(zip(schedules, seconds, strict=True))


@dataclass(frozen=True)
class _Sized:
    world: int


@lru_cache(maxsize=64)
def candidates(world: int, contracts: bool = False) -> tuple[Schedule, ...]:
    """The schedules to choose from; which they are depends on the world, and on whether the
    gathered rows are the K of the product, where sums must have a fixed order. Of equal ones the
    first is chosen, so adaptive comes before what it could also be called."""
    space = [*Schedule.space(_Sized(world)), *([_FEW_CHUNKS] if world > 1 else [])]
    if contracts:
        return tuple(s for s in space if s.serial or (s.fusion, s.cut) == ("unfused", "rows"))
    return tuple(sorted(space, key=lambda schedule: schedule.fusion != "adaptive"))


@lru_cache(maxsize=4096)
def _points(
    schedules: tuple[Schedule, ...], world: int, cut: int, adaptive_cut: int
) -> list[_rule.Candidate]:
    return [_candidate(schedule, world, cut, adaptive_cut) for schedule in schedules]


def _candidate(schedule: Schedule, world: int, cut: int, adaptive_cut: int) -> _rule.Candidate:
    depth = schedule.depth
    if depth is None:
        depth = adaptive_cut if schedule.fusion == "adaptive" else cut
        if schedule.engine == "direct" and (schedule.fusion == "adaptive" or cut != world):
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
