"""What a study of C3 found: every strategy in every scenario, means, sweeps, and how far the rules
are from the best. The same for simulated and for measured ones.

Ideal is the longer of GEMM and collective, each alone, and serial is one after the other. As in the
study that this repeats (arXiv 2412.14335), the collective there is the usual one, driven by cores;
where copy engines are faster than it, a strategy can be beyond ideal.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.strategy import NAMES, Strategy
from weft.study.c3.cases import Case, Kind, kind_of


@dataclass(frozen=True)
class Outcome:
    """One strategy in one scenario. Slowdowns are against the same work alone: of the GEMM from its
    start to its end, of the collective from the call to its end, however late it could start."""

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
class Choice:
    """What a rule picked before anything ran, and the best of the sweep it stands for. `loss` is
    how much longer the rule's pick takes, as a share."""

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
class Scenario:
    """One scenario: times alone, in seconds, and what each strategy made of it, by the name without
    units; those that count units are there with the best of their sweep, or with the rule's."""

    case: Case
    bound: str
    compute: float
    communication: float
    serial: float
    outcomes: Mapping[str, Outcome]
    sweeps: Mapping[str, tuple[Outcome, ...]] = field(default_factory=dict)
    choices: tuple[Choice, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    """Strategies that cannot be had here, by name, with the reason."""

    @property
    def ideal(self) -> float:
        return max(self.compute, self.communication)

    @property
    def kind(self) -> Kind:
        return kind_of(self.compute, self.communication)

    @property
    def best(self) -> Outcome:
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
    """A strategy over all scenarios: means, and the largest speedup."""

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
    """How a rule did over all scenarios."""

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
    """What compute units are worth to either side alone: how many times as long GEMMs take by how
    many were taken from them (means by what bounds them), and a collective by how many it has."""

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
    scenarios: tuple[Scenario, ...]
    units: UnitSweep | None = None
    pays_from: Mapping[str, int] = field(default_factory=dict)
    """By collective, the bytes from which copy engines are no slower than cores, alone."""
    published: Mapping[str, float] = field(default_factory=dict)
    """By strategy, the percent of ideal that was measured on the real machine, where known."""

    def means(self) -> list[Mean]:
        """Every strategy but serial, in the order of `NAMES`, where some scenario has it."""
        return [
            mean for name in NAMES if name != "serial" and (mean := self._mean(name)) is not None
        ]

    def mean(self, name: str) -> Mean:
        return next(mean for mean in self.means() if mean.name == name)

    def rules(self) -> list[Rule]:
        """Every question that a rule answers."""
        questions = dict.fromkeys(c.question for s in self.scenarios for c in s.choices)
        rules = []
        for question in questions:
            asked = [c for s in self.scenarios for c in s.choices if c.question == question]
            losses = [choice.loss for choice in asked]
            right = sum(choice.loss <= 1e-3 for choice in asked)
            rules.append(Rule(question, right, len(asked), statistics.fmean(losses), max(losses)))
        return rules

    def to_json(self) -> dict[str, Any]:
        """Plain data: times in milliseconds, slowdowns as factors."""
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
