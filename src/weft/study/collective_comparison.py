"""Which way carries out a collective fastest on one node, size by size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weft.errors import Unsupported
from weft.machine import Cluster
from weft.plan.collective import Collective, find_kind
from weft.study.collective_ways import CollectiveWay, ways

Progress = Callable[[float, str], None]


@dataclass(frozen=True)
class WayTimes:
    """One way at all sizes, in seconds. fixed: what it takes however little there is to move."""

    way: CollectiveWay
    fixed: float
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Comparison:
    """All ways that can carry out a collective on one node; `refused` has the others with their
    reasons."""

    place: Cluster
    collectives: tuple[Collective, ...]
    found: tuple[WayTimes, ...]
    refused: tuple[tuple[str, str], ...]

    @property
    def kind(self) -> str:
        return self.collectives[0].kind

    @property
    def world(self) -> int:
        return self.collectives[0].world

    def candidates(self) -> list[WayTimes]:
        """What can be the best. Algorithms over links are a model of what links allow, so they are
        only compared with each other if nothing else is there."""
        carried = [times for times in self.found if times.way.by != "links"]
        return carried or list(self.found)

    def ranked(self, index: int) -> list[WayTimes]:
        """The candidates at one size, the fastest first."""
        return sorted(self.candidates(), key=lambda times: times.seconds[index])

    def best(self, index: int) -> WayTimes:
        return self.ranked(index)[0]

    def bus_bandwidth(self, times: WayTimes, index: int) -> float:
        """Bytes per second that a rank sends or gets, as nccl-tests counts them."""
        about, one = find_kind(self.kind), self.collectives[index]
        if not times.seconds[index]:
            return 0.0
        share = 1.0 if about.rooted else (one.world - 1) / one.world
        return about.phases * one.total_bytes * share / times.seconds[index]

    def to_json(self, index: int) -> dict[str, Any]:
        """What was found at one size, as plain data."""
        return {
            "best": self.best(index).way.name,
            "ways": [
                {
                    "name": times.way.name,
                    "by": times.way.by,
                    "source": times.way.source,
                    "us": 1e6 * times.seconds[index],
                    "fixed_us": 1e6 * times.fixed,
                    "bus_GB_per_s": self.bus_bandwidth(times, index) / 1e9,
                }
                for times in self.found
            ],
            "refused": dict(self.refused),
        }


def compare(
    place: Cluster,
    kind: str,
    sizes: Sequence[float],
    world: int,
    only: CollectiveWay | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Asks every way (or only one) how long a collective takes on one node, at every size."""
    collectives = tuple(Collective.even(kind, int(size), world) for size in sizes)
    least = Collective.even(kind, 4 * world, world)
    found, refused = [], []
    asked = ways() if only is None else (only,)
    for number, way in enumerate(asked):
        if progress is not None:
            progress(number / len(asked), f"{kind} by {way.name}")
        reason = way.impossible(collectives[0], place)
        if reason is not None:
            refused.append((way.name, reason))
            continue
        fixed, *seconds = way.seconds([least, *collectives], place)
        found.append(WayTimes(way, fixed, tuple(seconds)))
    if not found:
        reasons = "; ".join(dict.fromkeys(reason for _, reason in refused))
        raise Unsupported(f"there is no way to carry out {kind} on {place.name}: {reasons}")
    return Comparison(place, collectives, tuple(found), tuple(refused))
