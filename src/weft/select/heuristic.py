"""Chooses by the rule: it computes a time for each candidate from sizes and a machine, and takes
the least.

The rule itself is native/rule.cpp, which is short and meant to be read; docs/heuristic.md derives
its terms. Nothing is simulated. One rule serves all machines; only their numbers differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import inf
from typing import Any, NamedTuple

from weft.dtype import ITEM_BYTES, rated
from weft.machine import Machine
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.schedule import Schedule
from weft.select import _rule
from weft.select.numbers import numbers
from weft.select.sizes import CONTRACT, GATHER, SUM_EVERYWHERE, Sizes, sizes_of

_ENGINES = ("dma", "cores", "direct")
_FUSIONS = ("fused", "unfused", "adaptive")
_SERIAL = Schedule.parse("serial@dma")
_FEW_CHUNKS = Schedule.parse("adaptive:4@dma")
"""An extra candidate: adaptive with few chunks, for machines where each chunk costs much."""

MARGIN = 0.01
"""The predicted gain over serial that overlap needs; less is within the error of the rule."""
ADAPTIVE_MARGIN = 0.12
"""The same for adaptive, whose pieces depend on arrivals, so that the rule knows only a mean."""
PASSING_MARGIN = 0.12
"""The same if sums are sent on to all ranks: they share links with products."""
RIVAL = 1.3
"""Candidates of another kind are rivals, for the guard to try, if the rule predicts at most this
many times the time of its choice."""

MOST_RIVALS = 2

PAPER = tuple(
    Schedule.parse(name)
    for name in ("uniform-fused-1d", "hetero-fused-1d", "hetero-unfused-1d", "uniform-fused-2d")
)
"""FiCCO's own four schedules."""


@dataclass(frozen=True)
class Choice:
    """A schedule, the reason for it, and what the guard compares it with: the best serial schedule,
    and rivals of other kinds."""

    schedule: Schedule
    why: str
    serial: Schedule = _SERIAL
    rivals: tuple[Schedule, ...] = field(default=())

    @cached_property
    def in_header(self) -> tuple[str, str]:
        """The choice as a header carries it."""
        return self.schedule.name, self.why


@lru_cache(maxsize=4096)
def choose(machine: Machine, operation: Any) -> Choice:
    """The schedule for which the rule gives the least time."""
    sizes = sizes_of(operation)
    table = _possible(_table(sizes.world, sizes.form), operation)
    seconds = _seconds(machine, sizes, table)
    best = _least(table, seconds)
    serial = min(table.serial, key=seconds.__getitem__)
    others = _rivals(table, seconds, best)
    schedules = table.schedules
    why = _why(machine, table, seconds, best)
    return Choice(schedules[best], why, schedules[serial], tuple(schedules[i] for i in others))


def estimates(
    machine: Machine, operation: Any, schedules: Sequence[Schedule] | None = None
) -> dict[Schedule, float]:
    """The seconds that the rule predicts for the candidates (by default for all)."""
    sizes = sizes_of(operation)
    table = _possible(_table(sizes.world, sizes.form), operation)
    if schedules is not None:
        table = _table_of(tuple(schedules))
    return dict(zip(table.schedules, _seconds(machine, sizes, table), strict=True))


def least(seconds: Mapping[Schedule, float]) -> Schedule:
    """The candidate with the least time, among those whose gain over serial exceeds the margin."""
    table = _table_of(tuple(seconds))
    return table.schedules[_least(table, list(seconds.values()))]


def candidates(world: int, form: int = GATHER) -> tuple[Schedule, ...]:
    """The schedules to choose from. They depend on the world, and on whether the gathered rows are
    the K of the product, where sums must have a fixed order. Of equal candidates the first is
    chosen, so adaptive comes before schedules that are equal to it."""
    return _table(world, form).schedules


class _Table(NamedTuple):
    """Candidates, and everything about them that does not depend on sizes, by index. This keeps a
    choice fast."""

    schedules: tuple[Schedule, ...]
    serial: tuple[int, ...]
    shares: tuple[float, ...]  # the share of serial's time that a candidate must stay below
    kinds: tuple[str, ...]
    points: list[_rule.Candidate]


@dataclass(frozen=True)
class _Sized:
    world: int


@lru_cache(maxsize=128)
def _table(world: int, form: int) -> _Table:
    space = [*Schedule.space(_Sized(world)), *([_FEW_CHUNKS] if world > 1 else [])]
    if form == CONTRACT:
        space = [s for s in space if s.serial or (s.fusion, s.cut) == ("unfused", "rows")]
    space.sort(key=lambda schedule: schedule.fusion != "adaptive")
    return _table_of(tuple(space), PASSING_MARGIN if form == SUM_EVERYWHERE else 0.0)


@lru_cache(maxsize=1024)
def _table_of(schedules: tuple[Schedule, ...], margin: float = 0.0) -> _Table:
    serial = tuple(i for i, schedule in enumerate(schedules) if schedule.serial)
    shares = tuple(inf if s.serial else 1.0 - max(margin, _margin(s)) for s in schedules)
    return _Table(
        schedules, serial, shares, tuple(map(_kind, schedules)), list(map(_candidate, schedules))
    )


def _possible(table: _Table, operation: Any) -> _Table:
    """The candidates that an operation can have."""
    refuses = getattr(operation, "refuses", None)
    if refuses is None:
        return table
    possible = tuple(s for s in table.schedules if refuses(s) is None)
    return table if len(possible) == len(table.schedules) else _table_of(possible)


def _margin(schedule: Schedule) -> float:
    if schedule.engine == "direct":
        return 0.0  # nothing is moved, so nothing can arrive late
    return ADAPTIVE_MARGIN if schedule.fusion == "adaptive" else MARGIN


def _kind(schedule: Schedule) -> str:
    if schedule.serial:
        return "serial"
    if schedule.engine == "direct":
        return "in place"
    return "adaptive" if schedule.fusion == "adaptive" else "cut"


def _seconds(machine: Machine, sizes: Sizes, table: _Table) -> list[float]:
    form, world, m, rows, columns, k, dtype, cuts, result = sizes
    if min(rows, k, sum(columns)) <= 0:
        # Without a product, nothing can hide communication.
        return [float(kind != "serial") for kind in table.kinds]
    rule = numbers(machine, world, dtype, result, form not in (GATHER, CONTRACT))
    return rule.seconds(table.points, form, world, m, rows, columns, k, cuts)


def _least(table: _Table, seconds: Sequence[float]) -> int:
    serial = min((seconds[i] for i in table.serial), default=inf)
    best, found = inf, 0
    for i, share in enumerate(table.shares):
        if seconds[i] < best and (share == inf or seconds[i] < serial * share):
            best, found = seconds[i], i
    return found


def _rivals(table: _Table, seconds: Sequence[float], best: int) -> list[int]:
    """The best candidate of every other kind (in place, adaptive, cut into fixed steps), if it is
    near. Candidates of one kind differ less, and the rule orders them well."""
    most = RIVAL * seconds[best]
    leading: dict[str, int] = {}
    for i, kind in enumerate(table.kinds):
        if seconds[i] <= most and (kind not in leading or seconds[i] < seconds[leading[kind]]):
            leading[kind] = i
    leading.pop(table.kinds[best], None)
    leading.pop("serial", None)
    return sorted(leading.values(), key=seconds.__getitem__)[:MOST_RIVALS]


def _candidate(schedule: Schedule) -> _rule.Candidate:
    return _rule.Candidate(
        engine=_ENGINES.index(schedule.engine),
        fusion=_FUSIONS.index(schedule.fusion),
        serial=schedule.serial,
        one_peer=schedule.pattern == "peer",
        columns=schedule.cut == "columns",
        uniform=schedule.start == "uniform",
        depth=schedule.depth or 0,
    )


def _why(machine: Machine, table: _Table, seconds: Sequence[float], best: int) -> str:
    if len(seconds) == 1:
        return "one rank has nothing to overlap"
    serial = min(seconds[i] for i in table.serial)
    if table.shares[best] == inf:
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
    op-to-byte ratio against the machine's balance, communication against compute. It is our
    interpretation of the paper, for comparison with the rule above."""
    uniform_1d, hetero_fused, hetero_unfused, uniform_2d = PAPER
    world, m, k = operation.world, operation.m, operation.k
    n = sum(max(operation.columns, key=sum))
    if m < k:
        return uniform_2d
    element = ITEM_BYTES[operation.dtype]
    rate = machine.compute.rate[rated(operation.dtype)]
    balance = rate / machine.memory.bandwidth
    rows = max(1, m // world**2)
    intensity = 2.0 * rows * n * k / (element * (rows * k + n * k + rows * n))
    if intensity > 2.0 * balance:
        return hetero_unfused
    compute = 2.0 * m * n * k / rate
    moved = (m - max(operation.rows)) * k * element
    communication = moved / machine.links.out_of_device(max(2, world))
    return uniform_1d if communication > 2.0 * compute else hetero_fused
