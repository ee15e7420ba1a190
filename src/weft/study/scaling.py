"""Simulates strong and weak scaling of a training step over nodes, plain and fused.

Strong scaling divides one batch among all devices; weak scaling gives each device the same amount.
The fused step uses the best of the numbers of slices in the workload's file. If none is faster than
plain, it is the plain step: a library would not overlap there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from weft.errors import Unsupported
from weft.machine import Cluster
from weft.models.workloads import Workload
from weft.simulate.cluster import Ran
from weft.timeline import Timeline

SCALINGS = ("weak", "strong")


@dataclass(frozen=True)
class Point:
    """One step on one number of nodes."""

    scaling: str
    nodes: int
    world: int
    size: float
    description: str
    plain: Ran
    fused: Ran
    chunks: int | None  # of the fused step; None if plain is as fast

    @property
    def saving(self) -> float:
        """The saving of the fused step, as a share of the plain step."""
        return 1.0 - self.fused.seconds / self.plain.seconds if self.plain.seconds else 0.0

    def exposed(self, fused: bool) -> float:
        """The seconds in which a device communicates but does not compute."""
        return (self.fused if fused else self.plain).timeline().exposed_communication(0)

    def compute(self, fused: bool) -> float:
        """The seconds in which a device computes."""
        return (self.fused if fused else self.plain).timeline().compute_seconds(0)

    def parts(self, fused: bool) -> dict[str, float]:
        """The seconds of tasks by name, with chunks and layers added up."""
        found: dict[str, float] = {}
        for span in (self.fused if fused else self.plain).spans:
            words = [word for word in span.task.split() if not word[:1].isdigit()]
            key = " ".join(words)
            found[key] = found.get(key, 0.0) + span.seconds
        return found


@dataclass(frozen=True)
class Scaling:
    """All points of a workload on a cluster."""

    workload: Workload
    cluster: Cluster
    points: tuple[Point, ...]

    def of(self, scaling: str) -> list[Point]:
        return [point for point in self.points if point.scaling == scaling]

    def timelines(self, point: Point) -> list[Timeline]:
        """The plain and the fused timeline of one device, which represents all."""
        return [point.plain.timeline("plain"), point.fused.timeline("fused")]

    def to_json(self) -> dict[str, Any]:
        """Plain data, for `json.dump`."""
        return {
            "workload": self.workload.name,
            "model": self.workload.config.title,
            "assumptions_file": str(self.workload.path),
            "assumptions": asdict(self.workload.config),
            "cluster": self.cluster.name,
            "points": [_point_json(point) for point in self.points],
        }


def scale(
    workload: Workload,
    cluster: Cluster,
    nodes: Sequence[int],
    scalings: Sequence[str] = SCALINGS,
    report: Callable[[float, str], None] | None = None,
) -> Scaling:
    """Simulates a step on each number of nodes."""
    if not nodes:
        raise Unsupported("there are no numbers of nodes to simulate")
    points = []
    wanted = [(scaling, count) for scaling in scalings for count in nodes]
    for number, (scaling, count) in enumerate(wanted):
        if report is not None:
            report(number / len(wanted), f"{scaling} scaling, {count} nodes")
        points.append(_point(workload, cluster.with_nodes(count), scaling))
    return Scaling(workload, cluster, tuple(points))


def _point(workload: Workload, cluster: Cluster, scaling: str) -> Point:
    module, config = workload.module, workload.config
    if config.dtype not in cluster.device.compute.rate:
        raise Unsupported(
            f"{cluster.device.name} has no GEMM rate for {config.dtype};"
            f" it has {', '.join(cluster.device.compute.rate)}"
        )
    size = module.size_of(config, cluster, scaling)
    plain: Ran = module.step(config, cluster, size, None).run()
    best, chunks = plain, None
    for tried in module.tries(config):
        ran = module.step(config, cluster, size, tried).run()
        if ran.seconds < best.seconds:
            best, chunks = ran, tried
    description = module.describe(config, cluster, size)
    return Point(scaling, cluster.nodes, cluster.world, size, description, plain, best, chunks)


def _point_json(point: Point) -> dict[str, Any]:
    return {
        "scaling": point.scaling,
        "nodes": point.nodes,
        "devices": point.world,
        "size": point.description,
        "plain_ms": 1e3 * point.plain.seconds,
        "fused_ms": 1e3 * point.fused.seconds,
        "saving": point.saving,
        "chunks": point.chunks,
        "plain_exposed_ms": 1e3 * point.exposed(False),
        "fused_exposed_ms": 1e3 * point.exposed(True),
        "plain_parts_ms": {name: 1e3 * seconds for name, seconds in point.parts(False).items()},
        "fused_parts_ms": {name: 1e3 * seconds for name, seconds in point.parts(True).items()},
    }
