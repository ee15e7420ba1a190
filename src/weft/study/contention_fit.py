"""The two fitted numbers of contention: what they are fitted to, and what they miss.

`links.interference` and `cores.memory_bytes_per_byte` of mi300x are fitted together to every second
scenario of ConCCL's ladder and of FiCCO's evaluation: to the published means of the six strategies,
and to the published largest speedup. The scenarios between them are held out. Neither paper
publishes single scenarios of these, so that both halves are held to the same published numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import sqrt

from weft.machine import Machine
from weft.schedule import Schedule
from weft.study.c3 import simulated
from weft.study.c3.cases import llama
from weft.study.exploration import explore
from weft.study.scenarios import ficco

LARGEST = 1.6
"""FiCCO (arXiv 2512.10236): up to 1.6x over serial."""

HALVES = ("fitted", "held out")

TRIED = (
    *((share, 1.45) for share in (0.0, 0.1, 0.18, 0.21, 0.24, 0.3)),
    *((0.21, traffic) for traffic in (1.0, 1.3, 1.6)),
)
"""What is shown of the pairs of numbers that were tried."""


@dataclass(frozen=True)
class Try:
    """One pair of numbers: on each half, percent of ideal by strategy and the largest speedup."""

    interference: float
    traffic: float
    ladder: dict[str, dict[str, float]]
    largest: dict[str, float]
    published: Mapping[str, float]

    def mean(self, name: str) -> float:
        """Percent of ideal under a strategy, over both halves."""
        return sum(ladder[name] for ladder in self.ladder.values()) / len(self.ladder)

    def miss(self, half: str) -> float:
        """Root mean square of the distances from what was published, in points; a hundredth of
        FiCCO's speedup is a point too."""
        away = [self.ladder[half][name] - known for name, known in self.published.items()]
        away.append(100.0 * (self.largest[half] - LARGEST))
        return sqrt(sum(one * one for one in away) / len(away))


def with_contention(machine: Machine, interference: float, traffic: float) -> Machine:
    """The machine with other values of the two numbers."""
    return replace(
        machine,
        links=replace(machine.links, interference=interference),
        cores=replace(machine.cores, memory_bytes_per_byte=traffic),
    )


def attempt(machine: Machine, interference: float, traffic: float) -> Try:
    """What a pair of numbers gives on both halves."""
    tried = with_contention(machine, interference, traffic)
    ladder: dict[str, dict[str, float]] = {}
    largest: dict[str, float] = {}
    published: Mapping[str, float] = {}
    schedules = [s for s in Schedule.space(_World()) if s.engine == "dma"]
    for number, half in enumerate(HALVES):
        found = simulated.study(tried, llama()[number::2])
        published = found.published
        ladder[half] = {mean.name: mean.percent_of_ideal for mean in found.means()}
        explored = explore(
            tried, "all_gather_matmul", ficco()[number::2], simulated.WORLD, schedules
        )
        largest[half] = max(scenario.best.speedup for scenario in explored.scenarios)
    return Try(interference, traffic, ladder, largest, published)


def attempts(machine: Machine, pairs: Iterable[tuple[float, float]] = TRIED) -> list[Try]:
    """What pairs of numbers give."""
    return [attempt(machine, *pair) for pair in pairs]


@dataclass(frozen=True)
class _World:
    world: int = simulated.WORLD
