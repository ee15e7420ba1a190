"""The results of a C3 study, simulated or measured: every strategy in every scenario, means,
sweeps, and the distance of the rules from the best.

Ideal is the longer one of GEMM and collective, each alone. Serial is one after the other. As in the
original study (arXiv 2412.14335), both use the collective that cores drive. If copy engines are
faster, a strategy can be better than ideal.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.strategy import NAMES, Strategy
from weft.study.c3.cases import C3Case, Kind, kind_of


@dataclass(frozen=True)
class C3Outcome:
    """One strategy in one scenario. Slowdowns are relative to the same work alone: of the GEMM from
    its start to its end, of the collective from the call to its end, even if it starts late."""

    strategy: Strategy
    seconds: float
    speedup: float
    percent_of_ideal: float
    gemm_slowdown: float
    collective_slowdown: float

    def to_json(self) -> dict[str, Any]:
        return {
            "strategy": self.strategy.name,
            "ms": 1e3 * self.seconds,
            "speedup": self.speedup,
            "percent_of_ideal": self.percent_of_ideal,
            "gemm_slowdown": self.gemm_slowdown,
            "collective_slowdown": self.collective_slowdown,
        }


@dataclass(frozen=True)
class RuleChoice:
    """The choice of a rule before anything runs, and the best choice of the sweep that it replaces.
    loss: how much longer the rule's choice takes, as a share."""

    question: str
    rule: Strategy
    best: Strategy
    loss: float

    def to_json(self) -> dict[str, Any]:
        return {
            "question": self.question,
            "rule": self.rule.name,
            "best": self.best.name,
            "loss_percent": 100.0 * self.loss,
        }


@dataclass(frozen=True)
class C3Scenario:
    """One scenario: the times of GEMM and collective alone, in seconds, and the outcome of each
    strategy by its name without units. A strategy with units has the best number of its sweep, or
    the rule's."""

    case: C3Case
    bound: str
    compute: float
    communication: float
    serial: float
    outcomes: Mapping[str, C3Outcome]
    sweeps: Mapping[str, tuple[C3Outcome, ...]] = field(default_factory=dict)
    choices: tuple[RuleChoice, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    """The strategies that are impossible here, by name, with the reason."""

    @property
    def ideal(self) -> float:
        return max(self.compute, self.communication)

    @property
    def kind(self) -> Kind:
        return kind_of(self.compute, self.communication)

    @property
    def best(self) -> C3Outcome:
        return min(self.outcomes.values(), key=lambda outcome: outcome.seconds)

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.case.label,
            "note": self.case.note,
            "gemm": {axis: getattr(self.case, axis) for axis in ("m", "n", "k")},
            "bound": self.bound,
            "collective": self.case.collective,
            "bytes": self.case.num_bytes,
            "kind": self.kind,
            "compute_ms": 1e3 * self.compute,
            "communication_ms": 1e3 * self.communication,
            "serial_ms": 1e3 * self.serial,
            "ideal_ms": 1e3 * self.ideal,
            "strategies": [{"name": n, **o.to_json()} for n, o in self.outcomes.items()],
            "sweeps": {
                base: [outcome.to_json() for outcome in outcomes]
                for base, outcomes in self.sweeps.items()
            },
            "rules": [choice.to_json() for choice in self.choices],
            "refused": dict(self.refused),
        }


@dataclass(frozen=True)
class Mean:
    """The means of a strategy over all scenarios, and its largest speedup."""

    name: str
    percent_of_ideal: float
    speedup: float
    most: float
    gemm_slowdown: float
    collective_slowdown: float
    by_kind: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "percent_of_ideal": self.percent_of_ideal,
            "speedup": self.speedup,
            "largest_speedup": self.most,
            "gemm_slowdown": self.gemm_slowdown,
            "collective_slowdown": self.collective_slowdown,
            "percent_of_ideal_by_kind": dict(self.by_kind),
        }


@dataclass(frozen=True)
class Rule:
    """The results of a rule over all scenarios."""

    question: str
    num_best: int
    of: int
    mean_loss: float
    worst_loss: float

    def to_json(self) -> dict[str, Any]:
        return {
            "question": self.question,
            "picked_the_best": self.num_best,
            "of": self.of,
            "mean_loss_percent": 100.0 * self.mean_loss,
            "worst_loss_percent": 100.0 * self.worst_loss,
        }


@dataclass(frozen=True)
class UnitSweep:
    """The effect of compute units on either side alone: the slowdown of GEMMs by the number of
    units taken away (means by what bounds them), and of a collective by its number of units."""

    taken: tuple[int, ...]
    gemms: Mapping[str, tuple[float, ...]]
    given: tuple[int, ...]
    collectives: Mapping[str, tuple[float, ...]]

    def to_json(self) -> dict[str, Any]:
        return {
            "units_taken": list(self.taken),
            "gemm_slowdown": {name: list(values) for name, values in self.gemms.items()},
            "units_given": list(self.given),
            "collective_slowdown": {n: list(values) for n, values in self.collectives.items()},
        }


@dataclass(frozen=True)
class Study:
    """All scenarios on one machine."""

    machine: str
    title: str
    world: int
    dtype: str
    measured: bool
    scenarios: tuple[C3Scenario, ...]
    units: UnitSweep | None = None
    pays_from: Mapping[str, int] = field(default_factory=dict)
    """By collective, the bytes from which on copy engines are not slower than cores."""
    published: Mapping[str, float] = field(default_factory=dict)
    """By strategy, the published percent of ideal of the real machine, if there is one."""

    def means(self) -> list[Mean]:
        """The means of every strategy but serial that a scenario has, in the order of `NAMES`."""
        return [
            mean for name in NAMES if name != "serial" and (mean := self._mean(name)) is not None
        ]

    def mean(self, name: str) -> Mean:
        return next(mean for mean in self.means() if mean.name == name)

    def rules(self) -> list[Rule]:
        """The results of every rule."""
        questions = dict.fromkeys(c.question for s in self.scenarios for c in s.choices)
        rules = []
        for question in questions:
            asked = [c for s in self.scenarios for c in s.choices if c.question == question]
            losses = [choice.loss for choice in asked]
            right = sum(choice.loss <= 1e-3 for choice in asked)
            rules.append(Rule(question, right, len(asked), statistics.fmean(losses), max(losses)))
        return rules

    def to_json(self) -> dict[str, Any]:
        """Plain data. Times are in milliseconds, slowdowns are factors."""
        return {
            "machine": self.machine,
            "world": self.world,
            "dtype": self.dtype,
            "measured": self.measured,
            "strategies": [
                {**mean.to_json(), "published_percent_of_ideal": self.published.get(mean.name)}
                for mean in self.means()
            ],
            "rules": [rule.to_json() for rule in self.rules()],
            "dma_pays_from_bytes": dict(self.pays_from),
            "units": None if self.units is None else self.units.to_json(),
            "scenarios": [scenario.to_json() for scenario in self.scenarios],
        }

    def _mean(self, name: str) -> Mean | None:
        pairs = [(s, o) for s in self.scenarios if (o := s.outcomes.get(name))]
        if not pairs:
            return None
        kinds: dict[str, list[float]] = {}
        for scenario, outcome in pairs:
            kinds.setdefault(scenario.kind, []).append(outcome.percent_of_ideal)
        found = [outcome for _, outcome in pairs]
        return Mean(
            name,
            statistics.fmean(o.percent_of_ideal for o in found),
            statistics.fmean(o.speedup for o in found),
            max(o.speedup for o in found),
            statistics.fmean(o.gemm_slowdown for o in found),
            statistics.fmean(o.collective_slowdown for o in found),
            {kind: statistics.fmean(values) for kind, values in kinds.items()},
        )
