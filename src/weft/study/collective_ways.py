"""The ways to carry out a collective: one small class each, in one list.

    channel           the host's own collectives, measured here (`weft.collectives`)
    pcpy, bcst, ...   commands of copy engines, a proved plan that is simulated
    cores             a library that compute units drive (RCCL, NCCL), in closed form
    direct, ring, ... algorithms over the links of a cluster, simulated

A way has a name, the reason why it cannot carry out a collective somewhere, its time, and a plan if
it has one. `register` adds another.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar, Protocol

import torch

from weft import collectives
from weft.errors import Unsupported, nearest
from weft.machine import Cluster, Machine
from weft.measure.launch import Report, launch
from weft.plan.collective import UNROOTED, Collective, find_kind
from weft.plan.command_variants import VARIANTS, CommandedCollective, Variant, refuses
from weft.plan.tasks import Plan
from weft.plan.verify import verify
from weft.simulate.cluster import ask
from weft.simulate.cluster.lowering import CHUNKED, FLAT
from weft.simulate.commanded import commanded_seconds
from weft.simulate.cost import collective as closed_form

CHUNKS = (1, 4)
"""Into how many chunks a part is cut that engines fetch and cores add: the better of these."""

ROUNDS = 9
"""How often the channel is timed at each size."""


class CollectiveWay(Protocol):
    """One way to carry out a collective."""

    @property
    def name(self) -> str: ...

    @property
    def by(self) -> str:
        """Who moves the bytes: the `host`, copy `engines`, `cores`, or `links` alone."""
        ...

    @property
    def source(self) -> str:
        """Where its times come from: `measured`, `simulated` or `closed form`."""
        ...

    def impossible(self, collective: Collective, place: Cluster) -> str | None:
        """Why this way cannot carry out the collective there, or None if it can."""
        ...

    def seconds(self, collectives: Sequence[Collective], place: Cluster) -> list[float]:
        """How long each of several takes there, one after the other."""
        ...

    def plan(self, collective: Collective, place: Cluster) -> Plan | None:
        """The plan that is carried out, proved right; None if the way has no plan."""
        ...


_ways: dict[str, CollectiveWay] = {}


def register(way: CollectiveWay) -> CollectiveWay:
    """Adds a way to the list."""
    _ways[way.name] = way
    return way


def ways() -> tuple[CollectiveWay, ...]:
    """All ways, in the order of tables."""
    return tuple(_ways.values())


def find_way(name: str) -> CollectiveWay:
    """The way of that name."""
    if name not in _ways:
        raise Unsupported(
            f"there is no way {name!r}{nearest(name, _ways)}; known: {', '.join(_ways)}"
        )
    return _ways[name]


@dataclass(frozen=True)
class ChannelWay:
    """The host's channel: ranks are started, and call weft's own functions."""

    name: ClassVar[str] = "channel"
    by: ClassVar[str] = "host"
    source: ClassVar[str] = "measured"

    def impossible(self, collective: Collective, place: Cluster) -> str | None:
        if place.machine is None or place.machine.host is None:
            return "it runs on the host of this process; ask with --machine cpu"
        if place.nodes > 1:
            return "it reaches the ranks of one machine"
        if collective.kind not in _CALLS:
            return f"it has no function {collective.kind}"
        return None

    def seconds(self, collectives: Sequence[Collective], place: Cluster) -> list[float]:
        by_rank = launch(collectives[0].world, _time_channel, list(collectives))
        return [max(taken) for taken in zip(*by_rank, strict=True)]

    def plan(self, collective: Collective, place: Cluster) -> Plan | None:
        return None


@dataclass(frozen=True)
class EngineWay:
    """Copy engines, commanded in one variant."""

    variant: Variant

    by: ClassVar[str] = "engines"
    source: ClassVar[str] = "simulated"

    @property
    def name(self) -> str:
        return str(self.variant)

    def impossible(self, collective: Collective, place: Cluster) -> str | None:
        reason = _needs_devices(place)
        if reason is None and place.nodes > 1:
            reason = "copy engines reach the devices of one node"
        return reason or refuses(collective, self.variant)

    def seconds(self, collectives: Sequence[Collective], place: Cluster) -> list[float]:
        return [self._best(collective, place)[0] for collective in collectives]

    def plan(self, collective: Collective, place: Cluster) -> Plan | None:
        return self._best(collective, place)[1]

    def _best(self, collective: Collective, place: Cluster) -> tuple[float, Plan]:
        """The seconds and the plan of the quickest number of chunks."""
        chunks = CHUNKS if find_kind(collective.kind).sums else (1,)
        plans = [_proved(CommandedCollective(collective, self.variant, n)) for n in chunks]
        return min(
            ((commanded_seconds(plan, place.device), plan) for plan in plans),
            key=lambda found: found[0],
        )


@dataclass(frozen=True)
class CoresWay:
    """A library whose kernels move the bytes, in the closed form that was fitted to it."""

    name: ClassVar[str] = "cores"
    by: ClassVar[str] = "cores"
    source: ClassVar[str] = "closed form"

    def impossible(self, collective: Collective, place: Cluster) -> str | None:
        if place.nodes > 1:
            return "its closed form is for the devices of one node"
        if collective.kind not in UNROOTED:
            return f"machines have no measured rates of a library's {collective.kind}"
        return _needs_devices(place)

    def seconds(self, collectives: Sequence[Collective], place: Cluster) -> list[float]:
        return [
            closed_form(place.device, one.kind, one.total_bytes, one.world) for one in collectives
        ]

    def plan(self, collective: Collective, place: Cluster) -> Plan | None:
        return None


@dataclass(frozen=True)
class AlgorithmWay:
    """An algorithm over the links of a cluster, with what a library takes to start and end it."""

    name: str

    by: ClassVar[str] = "links"
    source: ClassVar[str] = "simulated"

    def impossible(self, collective: Collective, place: Cluster) -> str | None:
        if collective.kind not in UNROOTED:
            return f"there are no rounds for {collective.kind}"
        if place.machine is not None and place.machine.host is not None:
            return "a host has no links between its ranks"
        if place.nodes == 1 and self.name in CHUNKED:
            return "it goes level by level, and one node has one level"
        if place.start == 0.0 and place.machine is not None:
            return f"{place.name} gives no time to start a library's collective"
        try:
            self.seconds([collective], place)
        except Unsupported as error:
            return str(error)
        return None

    def seconds(self, collectives: Sequence[Collective], place: Cluster) -> list[float]:
        return [_asked(place, one.kind, float(one.total_bytes), self.name) for one in collectives]

    def plan(self, collective: Collective, place: Cluster) -> Plan | None:
        return None


register(ChannelWay())
for _variant in VARIANTS:
    register(EngineWay(_variant))
register(CoresWay())
for _name in (*FLAT, *(name for name in CHUNKED if name != "in-order")):
    register(AlgorithmWay(_name))


def _needs_devices(place: Cluster) -> str | None:
    """Why there are no devices with engines and links here, or None if there are."""
    if place.machine is None:
        return f"{place.name} gives links but no machine"
    if place.machine.host is not None:
        return "a host's ranks copy by themselves; the channel serves all sizes"
    return None


@lru_cache(maxsize=256)
def _proved(operation: CommandedCollective) -> Plan:
    plan = operation.lower()
    verify(plan)
    return plan


@lru_cache(maxsize=1024)
def _asked(place: Cluster, kind: str, total: float, algorithm: str) -> float:
    return ask(place, kind, total, algorithm)[0].seconds


# -- the channel, measured -------------------------------------------------------------------------

_CALLS = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce", "broadcast")


def _time_channel(report: Report, asked: list[Collective]) -> list[float]:
    return [_time_call(one) for one in asked]


def _time_call(collective: Collective) -> float:
    """Seconds of one call on this rank: the median over rounds that all ranks begin together."""
    call = _call_of(collective)
    together = torch.zeros(1)
    calls = max(1, min(50, (1 << 22) // max(1, collective.total_bytes)))
    call()
    taken = []
    for _ in range(ROUNDS):
        collectives.all_reduce(together, out=together)
        started = time.perf_counter()
        for _ in range(calls):
            call()
        taken.append((time.perf_counter() - started) / calls)
    return statistics.median(taken)


def _call_of(collective: Collective) -> Callable[[], object]:
    """The function of weft that carries out an even collective, with its tensors."""
    part, world = max(1, collective.total // collective.world), collective.world
    dtype = getattr(torch, collective.dtype)
    small, whole = torch.ones(part, dtype=dtype), torch.ones(part * world, dtype=dtype)
    result = torch.empty_like(whole)
    calls: dict[str, Callable[[], object]] = {
        "all_gather": partial(collectives.all_gather, small, out=result),
        "all_to_all": partial(collectives.all_to_all, whole, out=result),
        "reduce_scatter": partial(collectives.reduce_scatter, whole, out=torch.empty_like(small)),
        "all_reduce": partial(collectives.all_reduce, whole, out=result),
        "broadcast": partial(collectives.broadcast, whole, collective.root, out=result),
    }
    return calls[collective.kind]


def world_of(place: Cluster, cores: int) -> int:
    """Ranks of a collective there: all devices, or on a host one rank per core."""
    machine: Machine | None = place.machine
    return max(2, cores) if machine is not None and machine.host is not None else place.world
