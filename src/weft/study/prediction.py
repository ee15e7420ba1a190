"""Compares a simulation of this host with a measurement on it, per schedule and as timelines.

The simulation uses the links of the measurement. A GEMM that calibration also measured runs among
the arms (the yardstick). Its time shows how fast the machine was, and everything that cores do is
scaled by it. Nothing else of the measurement enters the prediction.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

from weft.fabric import Link
from weft.machine import Machine, calibrated
from weft.measure.calibration import YARDSTICK
from weft.measure.measurement import Arm, Measurement
from weft.plan.tasks import Plannable
from weft.schedule import Schedule
from weft.simulate import run
from weft.simulate.cost import gemm
from weft.timeline import Timeline

TIE = 0.02
"""Schedules whose measured times differ by less than this share count as equal."""


@dataclass(frozen=True)
class Forecast:
    """One schedule: its simulation and its measurement."""

    arm: Arm
    seconds: float
    timeline: Timeline = field(repr=False)

    @property
    def error_percent(self) -> float:
        """How much longer the prediction is than the measurement; negative if it is shorter."""
        return 100.0 * (self.seconds / self.arm.seconds - 1.0)


@dataclass(frozen=True)
class Prediction:
    """All schedules of a measurement. speed: of the machine during the measurement, relative to
    calibration."""

    measurement: Measurement
    machine: Machine
    speed: float
    forecasts: tuple[Forecast, ...]

    @cached_property
    def median_error_percent(self) -> float:
        """The median absolute error over the schedules."""
        errors = sorted(abs(forecast.error_percent) for forecast in self.forecasts)
        middle = len(errors) // 2
        return errors[middle] if len(errors) % 2 else (errors[middle - 1] + errors[middle]) / 2.0

    @property
    def first(self) -> Forecast:
        """The schedule with the shortest prediction."""
        return min(self.forecasts, key=lambda forecast: forecast.seconds)

    @property
    def regret_percent(self) -> float:
        """How much longer the predicted best schedule took than the measured best."""
        return 100.0 * (self.first.arm.seconds / self.measurement.best.seconds - 1.0)

    @property
    def agreement_percent(self) -> float:
        """The share of pairs with different measured times that are predicted in the same order."""
        pairs = [
            (a, b)
            for a, b in combinations(self.forecasts, 2)
            if abs(a.arm.seconds - b.arm.seconds) > TIE * min(a.arm.seconds, b.arm.seconds)
        ]
        same = sum((a.seconds < b.seconds) == (a.arm.seconds < b.arm.seconds) for a, b in pairs)
        return 100.0 * same / len(pairs) if pairs else 100.0

    @property
    def noise_percent(self) -> float:
        """The median difference between the even and the odd rounds of each schedule. Errors of
        this size are noise of the machine."""
        differences = sorted(
            100.0 * abs(_median(s[::2]) / _median(s[1::2]) - 1.0)
            for s in (forecast.arm.samples for forecast in self.forecasts)
            if len(s) >= 2
        )
        return differences[len(differences) // 2] if differences else 0.0

    def timelines(self) -> list[Timeline]:
        """The measured and the simulated timeline of every schedule, the best measured first."""
        ordered = sorted(self.forecasts, key=lambda forecast: forecast.arm.seconds)
        return [
            replace(timeline, title=f"{forecast.arm.name}, {how}")
            for forecast in ordered
            for how, timeline in (
                ("measured", forecast.arm.timeline),
                ("simulated", forecast.timeline),
            )
        ]

    def to_json(self) -> dict[str, Any]:
        """The JSON of the measurement, with the predictions added."""
        found = self.measurement.to_json()
        by_name = {forecast.arm.name: forecast for forecast in self.forecasts}
        for row in found["schedules"]:
            forecast = by_name[row["name"]]
            row["predicted_ms"] = forecast.seconds * 1e3
            row["error_percent"] = forecast.error_percent
        found["prediction"] = {
            "machine": self.machine.title,
            "speed": self.speed,
            "median_error_percent": self.median_error_percent,
            "ranked_first": self.first.arm.name,
            "regret_percent": self.regret_percent,
            "rank_agreement_percent": self.agreement_percent,
            "noise_percent": self.noise_percent,
        }
        return found


def predict(measurement: Measurement, machine: Machine) -> Prediction:
    """Simulates every schedule of a measurement, on the links of the measurement."""
    operation: Any = measurement.operation
    speed = speed_of(machine, measurement.yardstick, operation.world)
    now = on_link(at_speed(machine, speed), measurement.link)
    return Prediction(
        measurement,
        machine,
        speed,
        tuple(forecast(operation, arm, now) for arm in measurement.arms),
    )


def speed_of(machine: Machine, yardstick: float, world: int) -> float:
    """The speed of the machine's cores, from the seconds of the yardstick, which `world` ranks ran
    at the same time; 1 if there was no yardstick."""
    if yardstick <= 0.0 or machine.host is None:
        return 1.0
    dtype, m, n, k = YARDSTICK
    on_one_core = -(-world // machine.host.cores)
    return on_one_core * gemm(machine, m, n, k, dtype).compute_seconds / yardstick


def forecast(operation: Plannable, arm: Arm, machine: Machine) -> Forecast:
    """Simulates one schedule. The machine has the links and the speed of the measurement."""
    simulation = run(operation.lower(Schedule.parse(arm.name)), machine)
    return Forecast(arm, simulation.seconds, simulation.timeline())


def on_link(machine: Machine, link: Link) -> Machine:
    """The host with its ranks connected by a link. A link at memory speed changes nothing."""
    links = replace(machine.links, topology=link.topology, latency=link.latency)
    if link.bandwidth is None:
        return replace(machine, links=links)
    # Every link has this rate. A port of a switch is one link; a mesh or ring has no other limit.
    total = link.bandwidth if link.topology == "switch" else link.bandwidth * links.world
    links = replace(
        links,
        peak_bandwidth=link.bandwidth,
        bandwidth=link.bandwidth,
        total_bandwidth=total,
    )
    return replace(machine, links=links)


def at_speed(machine: Machine, speed: float) -> Machine:
    """The host with cores that are `speed` times as fast."""
    compute, memory, engines, launch = (
        machine.compute,
        machine.memory,
        machine.engines,
        machine.launch,
    )
    return replace(
        machine,
        compute=replace(
            compute,
            peak={dtype: rate * speed for dtype, rate in compute.peak.items()},
            rate={dtype: rate * speed for dtype, rate in compute.rate.items()},
            measured=tuple(replace(p, rate=p.rate * speed) for p in compute.measured),
        ),
        memory=replace(
            memory,
            peak_bandwidth=memory.peak_bandwidth * speed,
            bandwidth=memory.bandwidth * speed,
            unit_bandwidth=memory.unit_bandwidth * speed,
        ),
        links=replace(
            machine.links,
            peak_bandwidth=machine.links.peak_bandwidth * speed,
            bandwidth=machine.links.bandwidth * speed,
            total_bandwidth=machine.links.total_bandwidth * speed,
        ),
        engines=replace(
            engines,
            bandwidth=engines.bandwidth * speed,
            local_bandwidth=engines.local_bandwidth * speed,
            row=engines.row / speed,
        ),
        launch=replace(
            launch,
            host=launch.host / speed,
            kernel=launch.kernel / speed,
            decision=launch.decision / speed,
        ),
    )


def keep_results(text: str) -> None:
    """Saves the results of `weft bench predict`, for docs/fidelity.md."""
    calibrated.write(_results(), text)


def kept_results() -> dict[str, Any]:
    """The saved results of `weft bench predict`. Raises OSError or ValueError if there are none."""
    found: dict[str, Any] = json.loads(_results().read_text(encoding="utf-8"))
    return found


def _results() -> Path:
    return calibrated.cache() / "bench" / "predict.json"


def _median(samples: Sequence[float]) -> float:
    return sorted(samples)[len(samples) // 2]
