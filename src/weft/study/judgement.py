"""Judges the heuristic: compares its choices with the best ones in random scenarios.

A scenario is a layer (log-uniform sizes in the range of real models), a world from 2 to 8, and a
link speed. It follows from a seed and a number, so that a heuristic can be developed on some seeds
and judged on others. Every candidate is simulated; the choice is made from static sizes only.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from random import Random
from typing import Any

from weft.errors import Unsupported, keeping
from weft.machine import Machine
from weft.measure.stopping import without_interrupts
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.schedule import Schedule
from weft.select.heuristic import PAPER, candidates, estimates, least, paper
from weft.simulate import check_fits, run

ROWS = (64, 262144)
"""M over all ranks: from a decode batch to a long training sequence."""
COLUMNS = (1024, 65536)
"""N over all ranks: from an attention projection to a joint gate and up projection."""
INNER = (1024, 16384)
"""K: hidden sizes, and the inner sizes of feed-forward layers."""
WORLDS = (2, 3, 4, 5, 6, 7, 8)
LINK_SPEEDS = (0.25, 0.5, 1.0, 2.0)
"""The speed of links, relative to the machine's."""


@dataclass(frozen=True)
class Drawn:
    """One random scenario: an operation on a machine with links `link_speed` times as fast."""

    operation: AllGatherMatmul
    link_speed: float
    link: str = ""  # on a host, where links are set, not scaled


def draw(seed: int, number: int, most: int = 8) -> Drawn:
    """The scenario with that number, independent of other draws. most: the largest world."""
    random = Random(f"weft judge {seed} {number}")
    world = random.choice([world for world in WORLDS if world <= most])
    m = size(random, ROWS, 8 * world)
    n = size(random, COLUMNS, 64 * world) // world
    k = size(random, INNER, 64)
    operation = AllGatherMatmul.of(m, n, k, world, "bfloat16")
    return Drawn(operation, random.choice(LINK_SPEEDS))


def size(random: Random, between: tuple[int, int], multiple: int) -> int:
    """A log-uniform size, rounded to a multiple as layer sizes are."""
    value = exp(random.uniform(log(between[0]), log(between[1])))
    return multiple * max(1, round(value / multiple))


def with_links(machine: Machine, speed: float) -> Machine:
    """The machine with links, and what drives them, `speed` times as fast."""
    if not speed > 0:
        raise Unsupported(f"links cannot be {speed} times as fast")
    links, cores = machine.links, machine.cores
    return replace(
        machine,
        links=replace(
            links,
            peak_bandwidth=links.peak_bandwidth * speed,
            bandwidth=links.bandwidth * speed,
            total_bandwidth=links.total_bandwidth * speed,
        ),
        engines=replace(machine.engines, bandwidth=machine.engines.bandwidth * speed),
        cores=replace(
            cores,
            protocols=tuple(
                replace(protocol, bandwidth=protocol.bandwidth * speed)
                for protocol in cores.protocols
            ),
        ),
    )


def simulated(machine: Machine, drawn: Drawn) -> dict[Schedule, float]:
    """The seconds of every candidate that fits the machine."""
    there = with_links(machine, drawn.link_speed)
    seconds: dict[Schedule, float] = {}
    for schedule in candidates(drawn.operation.world):
        plan = drawn.operation.lower(schedule)
        try:
            check_fits(plan, there)
        except Unsupported:
            continue
        seconds[schedule] = run(plan, there).seconds
    return seconds


@dataclass(frozen=True)
class Verdict:
    """One scenario: the choice in each set, and the seconds of every candidate."""

    drawn: Drawn
    chosen: Mapping[str, Schedule]
    seconds: Mapping[Schedule, float]

    @property
    def serial(self) -> float:
        return min(time for schedule, time in self.seconds.items() if schedule.serial)

    def best(self, kind: str) -> Schedule:
        """The fastest candidate of a set."""
        among = [schedule for schedule in self.seconds if IN_SET[kind](schedule)]
        return min(among, key=self.seconds.__getitem__)

    def regret(self, kind: str) -> float:
        """How much longer the choice takes than the best, as a share."""
        return self.seconds[self.chosen[kind]] / self.seconds[self.best(kind)] - 1.0

    def lost_to_serial(self, kind: str) -> float:
        """How much longer the choice takes than serial, as a share; negative if it is faster."""
        return self.seconds[self.chosen[kind]] / self.serial - 1.0

    def to_json(self) -> dict[str, Any]:
        best = self.best("heuristic")
        return {
            "operation": self.drawn.operation.label,
            "links": self.drawn.link or f"{self.drawn.link_speed:g}x",
            "chosen": self.chosen["heuristic"].name,
            "best": best.name,
            "best_ms": self.seconds[best] * 1e3,
            "regret": 100.0 * self.regret("heuristic"),
            "over_serial": 100.0 * self.lost_to_serial("heuristic"),
        }


IN_SET: dict[str, Callable[[Schedule], bool]] = {
    "heuristic": lambda schedule: True,
    "fixed": lambda schedule: schedule.fusion != "adaptive",
    "paper": lambda schedule: schedule in PAPER,
}
"""The judged sets: all candidates, those without adaptive, and the four of FiCCO."""


@dataclass(frozen=True)
class Score:
    """The quality of the choices in one set, in percent. `slower_than_serial` is a count."""

    exact: float
    within_2_percent: float
    within_10_percent: float
    mean_regret: float
    worst_regret: float
    slower_than_serial: int
    count: int

    def to_json(self) -> dict[str, float]:
        return {
            "exact": self.exact,
            "within_2_percent": self.within_2_percent,
            "within_10_percent": self.within_10_percent,
            "mean_regret": self.mean_regret,
            "worst_regret": self.worst_regret,
            "slower_than_serial": self.slower_than_serial,
        }


@dataclass(frozen=True)
class Judgement:
    """All scenarios of one seed on one machine. tolerance: the share beyond which a choice counts
    as slower than serial."""

    machine: str
    seed: int
    tolerance: float
    verdicts: tuple[Verdict, ...]

    def score(self, kind: str) -> Score:
        regrets = [verdict.regret(kind) for verdict in self.verdicts]
        count = len(regrets)
        return Score(
            exact=_percent(sum(regret <= 0.0 for regret in regrets), count),
            within_2_percent=_percent(sum(regret <= 0.02 for regret in regrets), count),
            within_10_percent=_percent(sum(regret <= 0.10 for regret in regrets), count),
            mean_regret=100.0 * sum(regrets) / count,
            worst_regret=100.0 * max(regrets),
            slower_than_serial=sum(
                verdict.lost_to_serial(kind) > self.tolerance for verdict in self.verdicts
            ),
            count=count,
        )

    def to_json(self) -> dict[str, Any]:
        scores = {kind: self.score(kind).to_json() for kind in IN_SET}
        return {
            "machine": self.machine,
            "seed": self.seed,
            "scenarios": len(self.verdicts),
            **scores,
            "verdicts": [verdict.to_json() for verdict in self.verdicts],
        }


def _percent(part: int, whole: int) -> float:
    return 100.0 * part / whole


def judge(
    machine: Machine,
    count: int,
    seed: int,
    *,
    processes: int | None = None,
    report: Callable[[float, str], None] | None = None,
) -> Judgement:
    """Judges the heuristic on simulated scenarios, with a tolerance of 1 %."""
    if count < 1:
        raise Unsupported(f"there must be at least 1 scenario, not {count}")
    most = machine.links.world
    if most < 2:
        raise Unsupported(f"{machine.name} has one device, so that nothing can overlap")
    work = [(machine, draw(seed, number, most)) for number in range(count)]
    verdicts: list[Verdict] = []

    def found() -> Judgement:
        return Judgement(machine.name, seed, 0.01, tuple(verdicts))

    with keeping(lambda: found() if verdicts else None):
        for done, verdict in enumerate(_each(work, processes), 1):
            verdicts.append(verdict)
            if report is not None:
                report(done / count, f"{done} of {count}")
    return found()


def _each(work: list[tuple[Machine, Drawn]], processes: int | None) -> Iterator[Verdict]:
    """The verdicts in order, from one process per core."""
    wanted = min(processes or len(os.sched_getaffinity(0)), len(work))
    if wanted == 1:
        yield from map(_verdict, work)
        return
    with without_interrupts():  # this process handles Ctrl-C and ends the others
        made = multiprocessing.get_context("spawn").Pool(wanted)
    with made as pool:
        yield from pool.imap(_verdict, work, chunksize=4)


def _verdict(work: tuple[Machine, Drawn]) -> Verdict:
    machine, drawn = work
    # Plans have no reference cycles but many objects, which the collector would scan repeatedly.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        seconds = simulated(machine, drawn)
    finally:
        if was_enabled:
            gc.enable()
    there = with_links(machine, drawn.link_speed)
    return Verdict(drawn, chosen(there, drawn.operation, list(seconds)), seconds)


def chosen(
    machine: Machine, operation: AllGatherMatmul, among: Sequence[Schedule]
) -> dict[str, Schedule]:
    """The choice in each set, from static sizes only."""
    predicted = estimates(machine, operation, among)
    choices = {
        kind: least({s: time for s, time in predicted.items() if IN_SET[kind](s)})
        for kind in ("heuristic", "fixed")
    }
    return {**choices, "paper": paper(machine, operation)}
