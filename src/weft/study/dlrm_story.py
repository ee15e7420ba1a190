"""What determines the saving of a fused DLRM step: one assumption is changed at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from weft.machine import load_cluster
from weft.models.workloads import load_workload
from weft.study.scaling import Point, scale

NODES = 128
CLUSTERS = ("mi300x", "h100")

CHANGES: dict[str, dict[str, Any]] = {
    "as stated": {},
    "gradients summed in float32": {"gradient_bytes": 4.0},
    "2,048 samples per device": {"batch_per_device": 2048},
    "128 samples per device": {"batch_per_device": 128},
    "pooling 30 instead of 15": {"pooling": 30.0},
    "pooling 5": {"pooling": 5.0},
    "rows sent in float32": {"sent_bytes": 4.0},
    "lookups at 0.8 of memory bandwidth": {"lookup_share": 0.8},
    "lookups at 0.4 of memory bandwidth": {"lookup_share": 0.4},
}


@dataclass(frozen=True)
class DlrmStory:
    """The savings by change and cluster, the step as stated, and MLPerf's model."""

    savings: dict[str, tuple[float, ...]]
    stated: tuple[Point, ...]
    mlperf: tuple[float, ...]


def tell_dlrm(report: Callable[[float, str], None] | None = None) -> DlrmStory:
    """Simulates every change on every cluster, with weak scaling."""
    savings = {}
    stated: tuple[Point, ...] = ()
    for number, (name, change) in enumerate(CHANGES.items()):
        if report is not None:
            report(number / (len(CHANGES) + 1), f"DLRM, {name}")
        points = tuple(_point("dlrm", cluster, change) for cluster in CLUSTERS)
        savings[name] = tuple(point.saving for point in points)
        stated = stated or points
    mlperf = tuple(_point("dlrm-mlperf", cluster, {}).saving for cluster in CLUSTERS)
    return DlrmStory(savings, stated, mlperf)


def _point(model: str, cluster: str, change: dict[str, Any]) -> Point:
    workload = load_workload("dlrm", model)
    workload = replace(workload, config=replace(workload.config, **change))
    return scale(workload, load_cluster(cluster), (NODES,), ("weak",)).points[0]
