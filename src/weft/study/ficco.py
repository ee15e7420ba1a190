"""Simulates the evaluation of FiCCO, without tuning to its scenarios: on 8 x MI300X, as in the
paper, and on a machine with a switch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from weft.machine import load
from weft.study.exploration import Exploration, Scenario, ScheduleOutcome, explore
from weft.study.scenarios import ficco

HEAVY = 0.7
"""A scenario is communication-heavy if communication takes this share of compute, or more."""


@dataclass(frozen=True)
class FiccoEvaluation:
    """The 16 scenarios on a full mesh and on a switch."""

    mesh: Exploration
    switch: Exploration

    @property
    def largest_ideal(self) -> float:
        return max(scenario.serial / scenario.ideal for scenario in self.mesh.scenarios)

    @property
    def top(self) -> Scenario:
        """The scenario with the largest speedup."""
        return max(self.mesh.scenarios, key=lambda scenario: scenario.best.speedup)

    @property
    def winners(self) -> Counter[str]:
        """For each fixed schedule, the number of scenarios in which it is the best fixed one."""
        return Counter(best_fixed(scenario).schedule.name for scenario in self.mesh.scenarios)

    @property
    def heavy(self) -> list[Scenario]:
        """The communication-heavy scenarios."""
        return [s for s in self.mesh.scenarios if s.communication > HEAVY * s.compute]

    @property
    def shard_slowdowns(self) -> list[float]:
        """The time of shard-p2p relative to serial, in the communication-heavy scenarios."""
        return [1.0 / scenario.outcome("shard-p2p@dma").speedup for scenario in self.heavy]

    @property
    def shard_on_switch(self) -> float:
        """The smallest speedup of shard-p2p on a switch."""
        return min(s.outcome("shard-p2p@dma").speedup for s in self.switch.scenarios)

    @property
    def engines_over_cores(self) -> float:
        """The smallest speedup of the best schedule on copy engines over the best on cores."""
        return min(
            _best(scenario, "dma").speedup / _best(scenario, "cores").speedup
            for scenario in self.mesh.scenarios
        )

    @property
    def cores_ahead(self) -> dict[str, int]:
        """The schedules that are more than 1 % faster on cores, and in how many scenarios."""
        found: Counter[str] = Counter()
        for scenario in self.mesh.scenarios:
            for outcome in scenario.outcomes:
                if outcome.schedule.engine != "dma" or outcome.schedule.serial:
                    continue
                twin = scenario.outcome(outcome.schedule.with_engine("cores"))
                found[outcome.schedule.base] += twin.seconds < 0.99 * outcome.seconds
        return {name: count for name, count in found.items() if count}


def evaluate(report: Callable[[float, str], None] | None = None) -> FiccoEvaluation:
    """Explores the scenarios on both machines."""
    found = []
    for number, name in enumerate(("mi300x", "h100")):

        def progress(
            done: int, of: int, label: str, number: int = number, name: str = name
        ) -> None:
            if report is not None:
                report((number + done / of) / 2, f"{label} on {name}")

        found.append(explore(load(name), "all_gather_matmul", ficco(), 8, progress=progress))
    return FiccoEvaluation(*found)


def best_fixed(scenario: Scenario) -> ScheduleOutcome:
    """The best schedule that is not adaptive."""
    fixed = [outcome for outcome in scenario.outcomes if outcome.schedule.fusion != "adaptive"]
    return min(fixed, key=lambda outcome: outcome.seconds)


def _best(scenario: Scenario, engine: str) -> ScheduleOutcome:
    of_engine = [outcome for outcome in scenario.outcomes if outcome.schedule.engine == engine]
    return min(of_engine, key=lambda outcome: outcome.seconds)
