"""Simulates the schedules of an operation over all devices of a cluster, with flat plans.

A flat plan treats all peers equally, so its copies compete for the network cards. Serial is the
faster one of copy engines and cores, as inside a node. Compute and communication are its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weft.errors import Unsupported
from weft.machine import Cluster
from weft.operation import find
from weft.plan.tasks import Copy, Plannable
from weft.schedule import Schedule
from weft.simulate import Simulation
from weft.simulate.cluster.plan_runs import run_plan
from weft.study.scenarios import Shape
from weft.timeline import percent_of_ideal

MOST_RANKS = 64
"""The largest number of ranks, because every rank and the chunks of all pairs are simulated."""


@dataclass(frozen=True)
class ClusterPlans:
    """A shape on a cluster: the seconds of every schedule, and why others are left out."""

    cluster: Cluster
    operation: Plannable
    compute: float
    communication: float
    serial: float
    outcomes: tuple[tuple[Schedule, float], ...]
    refused: tuple[tuple[Schedule, str], ...]

    def speedup(self, seconds: float) -> float:
        return self.serial / seconds if seconds else 1.0

    def reached(self, seconds: float) -> float:
        """The percent of ideal."""
        return percent_of_ideal(self.serial, seconds, self.compute, self.communication)

    def to_json(self) -> dict[str, Any]:
        return {
            "cluster": self.cluster.name,
            "nodes": self.cluster.nodes,
            "operation": self.operation.label,
            "compute_ms": 1e3 * self.compute,
            "communication_ms": 1e3 * self.communication,
            "serial_ms": 1e3 * self.serial,
            "schedules": [
                {
                    "name": schedule.name,
                    "ms": 1e3 * seconds,
                    "speedup": self.speedup(seconds),
                    "percent_of_ideal": self.reached(seconds),
                }
                for schedule, seconds in self.outcomes
            ],
        }


def explore_plans(
    cluster: Cluster,
    name: str,
    shape: Shape,
    schedules: Sequence[Schedule] | None = None,
    report: Callable[[float, str], None] | None = None,
) -> ClusterPlans:
    """Simulates schedules (default: `Schedule.space`) of an operation over a whole cluster."""
    world = cluster.world
    if world > MOST_RANKS:
        raise Unsupported(
            f"plans are simulated rank by rank, up to {MOST_RANKS} of them, not {world};"
            " ask for a --collective or a --workload on larger clusters"
        )
    columns = -(-shape.n // world)
    operation = shape.operation(find(name), columns, world)
    serials = {
        schedule: run_plan(operation.lower(schedule), cluster)
        for schedule in (Schedule.parse("serial@dma"), Schedule.parse("serial@cores"))
    }
    baseline = min(serials.values(), key=lambda simulation: simulation.seconds)
    communication = max(
        (piece.end for piece in baseline.pieces if isinstance(piece.task, Copy)), default=0.0
    )
    outcomes, refused = [], []
    wanted = list(Schedule.space(operation) if schedules is None else schedules)
    for number, schedule in enumerate(wanted):
        if report is not None:
            report(number / len(wanted), schedule.name)
        try:
            simulation = serials.get(schedule) or run_plan(operation.lower(schedule), cluster)
        except Unsupported as error:
            refused.append((schedule, str(error)))
            continue
        outcomes.append((schedule, simulation.seconds))
    if not outcomes:
        raise Unsupported(f"{shape.label}: {refused[0][1]}")
    return ClusterPlans(
        cluster,
        operation,
        _compute(baseline),
        communication,
        baseline.seconds,
        tuple(outcomes),
        tuple(refused),
    )


def _compute(simulation: Simulation) -> float:
    """The compute time of the rank that ends last."""
    pieces = simulation.compute_pieces(simulation.last_rank)
    return sum(piece.seconds for piece in pieces)
