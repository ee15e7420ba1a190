"""The time of a collective on a cluster, by algorithm, and the lower bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.errors import Unsupported
from weft.machine import Cluster
from weft.plan.collective import find_kind
from weft.simulate.cluster.bound import bound
from weft.simulate.cluster.engine import ClusterTask, Ran, run
from weft.simulate.cluster.lowering import CHUNKED, FLAT, Algorithm, lower
from weft.simulate.cluster.wiring import Wiring
from weft.timeline import Timeline

ALGORITHMS = ("auto", *FLAT, *CHUNKED)
CHUNKS = (1, 2, 4, 8, 16, 32, 64)
"""The numbers of chunks that are tried for hierarchical algorithms by default."""


@dataclass(frozen=True)
class CollectiveAnswer:
    """The result for a collective on a cluster with one algorithm."""

    cluster: Cluster
    kind: str
    total: float
    algorithm: str
    chunks: int
    ran: Ran

    @property
    def seconds(self) -> float:
        return self.ran.seconds

    @property
    def bound(self) -> float:
        """The seconds that the slowest link alone would take."""
        return bound(self.cluster, self.kind, self.total)[0]

    @property
    def slowest(self) -> str:
        """The link that determines the bound."""
        return bound(self.cluster, self.kind, self.total)[1]

    @property
    def over_bound(self) -> float:
        """The time as a multiple of the bound."""
        return self.seconds / self.bound if self.bound else 1.0

    @property
    def bus_bandwidth(self) -> float:
        """The bytes per second that a rank sends or receives, as nccl-tests counts them."""
        if not self.seconds:
            return 0.0
        world = self.cluster.world
        return find_kind(self.kind).phases * self.total * (world - 1) / world / self.seconds

    def timeline(self) -> Timeline:
        return self.ran.timeline(f"{self.kind} {self.algorithm}")

    def to_json(self) -> dict[str, Any]:
        return {
            "algorithm": self.algorithm,
            "chunks": self.chunks,
            "us": 1e6 * self.seconds,
            "bound_us": 1e6 * self.bound,
            "over_bound": self.over_bound,
            "bus_GB_per_s": self.bus_bandwidth / 1e9,
            "slowest": self.slowest,
        }


def ask(
    cluster: Cluster, kind: str, total: float, algorithm: str = "auto", chunks: int | None = None
) -> list[CollectiveAnswer]:
    """Simulates a collective over all ranks of a cluster; the fastest result comes first.

    `auto` tries all algorithms, `hierarchical` all numbers of chunks unless one is given. `total`:
    the bytes of the gathered result, of a rank's input of a reduce-scatter or all-to-all, or of the
    vector of an all-reduce.
    """
    wiring = Wiring(cluster)
    names = _able(wiring, kind) if algorithm == "auto" else [str(Algorithm.parse(algorithm))]
    found = []
    for name in names:
        tries = CHUNKS if chunks is None and _chunked(wiring, name) else (chunks or 1,)
        answers: list[CollectiveAnswer] = []
        for n in tries:
            ran = run(wiring, lower(wiring, kind, total, name, chunks=n))
            answers.append(CollectiveAnswer(cluster, kind, total, name, n, ran))
            if len(answers) > 3 and min(answers, key=_seconds) not in answers[-3:]:
                break  # smaller chunks only add latency
        found.append(min(answers, key=_seconds))
    return sorted(found, key=_seconds)


def _seconds(answer: CollectiveAnswer) -> float:
    return answer.seconds


def together(cluster: Cluster, asked: Sequence[tuple[str, float, str, int]]) -> list[float]:
    """The ends of several collectives (kind, total, algorithm, chunks) that start together."""
    wiring = Wiring(cluster)
    tasks: list[ClusterTask] = []
    for number, (kind, total, algorithm, chunks) in enumerate(asked):
        tasks += lower(
            wiring,
            kind,
            total,
            algorithm,
            chunks=chunks,
            name=f"{number} {kind}",
            first=len(tasks),
            lanes=f"{number} ",
        )
    ran = run(wiring, tasks)
    return [ran.end_of(f"{number} ") for number in range(len(asked))]


def _chunked(wiring: Wiring, name: str) -> bool:
    levels = sum(size > 1 for size in wiring.shape)
    return levels > 1 and name.partition(":")[0] in CHUNKED


def _able(wiring: Wiring, kind: str) -> list[str]:
    """The algorithms that are possible here."""
    levels = [axis for axis, size in enumerate(wiring.shape) if size > 1]
    names = [*FLAT]
    if len(levels) > 1:
        names += ["hierarchical", *(["mixed"] if kind != "all_to_all" else [])]
    if (
        kind == "all_reduce"
        and len(wiring.shape) > 1
        and not any(wiring.is_ring(axis) for axis in levels if axis)
    ):
        names.append("tree")
    found = []
    for name in names:
        try:
            lower(wiring, kind, 1.0, name, chunks=1)
        except Unsupported:
            continue
        found.append(name)
    if not found:  # raises with the reason, e.g. for a kind that does not exist
        lower(wiring, kind, 1.0, "direct")
    return found
