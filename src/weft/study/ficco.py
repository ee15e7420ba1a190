"""FiCCO's story, simulated with no tuning to any scenario: what its evaluation says of 8 x MI300X,
and what should hold on a machine with a switch instead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from weft.machine import load
from weft.study.exploration import Exploration, Outcome, Scenario, explore
from weft.study.scenarios import ficco

HEAVY = 0.7
"""Communication this long against compute makes a scenario communication-heavy."""


@dataclass(frozen=True)
class Story:
    """The 16 scenarios on a full mesh and behind a switch."""

    mesh: Exploration
    switch: Exploration

    @property
    def largest_ideal(self) -> float:
        return max(scenario.serial / scenario.ideal for scenario in self.mesh.scenarios)

    @property
    def top(self) -> Scenario:
        """Where the best schedule gives most."""
        return max(self.mesh.scenarios, key=lambda scenario: scenario.best.speedup)

    @property
    def winners(self) -> Counter[str]:
        """In how many scenarios each fixed schedule is the best of the fixed ones."""
        return Counter(best_fixed(scenario).schedule.name for scenario in self.mesh.scenarios)

    @property
    def heavy(self) -> list[Scenario]:
        """The communication-heavy scenarios."""
        return [s for s in self.mesh.scenarios if s.communication > HEAVY * s.compute]

    @property
    def shard_slowdowns(self) -> list[float]:
        """How many times as long as serial shard-p2p takes where communication is heavy."""
        return [1.0 / scenario.outcome("shard-p2p@dma").speedup for scenario in self.heavy]

    @property
    def shard_on_switch(self) -> float:
        """The least speedup of shard-p2p behind a switch."""
        return min(s.outcome("shard-p2p@dma").speedup for s in self.switch.scenarios)

    @property
    def engines_over_cores(self) -> float:
        """The least lead of the best schedule on copy engines over the best on cores."""
        return min(
            _best(scenario, "dma").speedup / _best(scenario, "cores").speedup
            for scenario in self.mesh.scenarios
        )

    @property
    def cores_ahead(self) -> dict[str, int]:
        """Schedules whose twin on cores is faster by more than 1 %, and in how many scenarios."""
        found: Counter[str] = Counter()
        for scenario in self.mesh.scenarios:
            for outcome in scenario.outcomes:
                if outcome.schedule.engine != "dma" or outcome.schedule.serial:
                    continue
                twin = scenario.outcome(outcome.schedule.with_engine("cores"))
                found[outcome.schedule.base] += twin.seconds < 0.99 * outcome.seconds
        return {name: count for name, count in found.items() if count}


def tell(report: Callable[[float, str], None] | None = None) -> Story:
    """Explores the scenarios on both machines."""
    found = []
    for number, name in enumerate(("mi300x", "h100")):

        def progress(
            done: int, of: int, label: str, number: int = number, name: str = name
        ) -> None:
            if report is not None:
                report((number + done / of) / 2, f"{label} on {name}")

        found.append(explore(load(name), "all_gather_matmul", ficco(), 8, progress=progress))
    return Story(*found)


def best_fixed(scenario: Scenario) -> Outcome:
    """The best schedule that is not adaptive."""
    fixed = [outcome for outcome in scenario.outcomes if outcome.schedule.fusion != "adaptive"]
    return min(fixed, key=lambda outcome: outcome.seconds)


def _best(scenario: Scenario, engine: str) -> Outcome:
    of_engine = [outcome for outcome in scenario.outcomes if outcome.schedule.engine == engine]
    return min(of_engine, key=lambda outcome: outcome.seconds)
