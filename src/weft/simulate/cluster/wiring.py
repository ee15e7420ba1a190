"""The shared resources of bytes between two devices of a cluster, seen from one device.

All devices do the same, shifted around their node and around the network. So one device represents
all, and resources that a shift maps onto each other are one. A resource that several devices share
(the links of a node to the network, the links up from a leaf switch) is modelled as one device's
part of it. The address of a rank is its distance: a shift along the devices of the node, then along
every axis of the network.

    out, in          all bytes that leave or enter a device over the links of its node
    link, peer       mesh: one for every distance
    ring, direction  ring: the link to the next device, upwards and downwards
    card out, in     the device's part of the network cards
    up, down         fat tree: its part of the links between leaf switches
    cable            ring and torus between nodes: by axis and direction; mesh: by distance
    memory           of the device: what it sends is read, what it receives is written
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product, repeat

from weft.machine import Cluster
from weft.simulate.sharing import Resource

Shift = tuple[int, ...]
"""The distance of a rank along each axis: the devices of a node, then the network's axes."""

Name = tuple[str, int, int]
"""The kind of a resource, its axis, and its direction or distance."""

Draws = dict[Name, float]

Axes = tuple[int, ...]
"""The axes of a cluster over which something runs. Axis 0 is the devices of a node."""

MOST_WAYS = 64
"""If there are more routes than this to all others, those of equal latency are merged."""


@dataclass(frozen=True)
class Route:
    """A route to a rank for `share` of the bytes. The first of them arrive after `latency`."""

    share: float
    draws: Draws
    latency: float


@dataclass(frozen=True)
class Way:
    """Equal routes: what they draw together for each byte and for each message."""

    latency: float
    per_byte: Draws
    per_message: Draws


class Wiring:
    """The resources of a cluster, each made when it is first used."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.shape = (cluster.devices, *cluster.dims)
        self._resources: dict[Name, Resource] = {}
        network, devices = cluster.network, cluster.devices
        cards = cluster.nic_bandwidth
        cable = None if network is None or network.bandwidth is None else network.bandwidth
        self._capacity = {
            "out": cluster.links.out_of_device,
            "in": cluster.links.out_of_device,
            "link": cluster.links.bandwidth,
            "ring": cluster.links.bandwidth,
            "card out": cards,
            "card in": cards,
            "up": cards / (1.0 if network is None else network.oversubscription),
            "down": cards / (1.0 if network is None else network.oversubscription),
            "cable": (cable or float("inf")) / devices,
            "memory": float("inf") if cluster.machine is None else cluster.machine.memory.bandwidth,
        }
        self._per_byte = 0.0
        if cluster.machine is not None:
            self._per_byte = cluster.machine.engines.memory_bytes_per_byte

    def resource(self, name: Name) -> Resource:
        found = self._resources.get(name)
        if found is None:
            found = self._resources[name] = Resource(name, self._capacity[name[0]])
        return found

    def memory(self) -> Resource:
        return self.resource(("memory", 0, 0))

    def at(self, axis: int, distance: int) -> Shift:
        """The rank at this distance along one axis."""
        return tuple(distance % size if i == axis else 0 for i, size in enumerate(self.shape))

    def shifts(self, axes: Axes) -> Iterator[tuple[Shift, int]]:
        """All other ranks along some axes, as one rank for each kind of route, and their numbers.

        Behind a switch all nodes have the same kind of route; on cables each has its own.
        """
        ranges = [list(self._distances(axis)) if axis in axes else [(0, 1)] for axis in self._axes]
        for each in product(*ranges):
            shift = tuple(distance for distance, _ in each)
            if any(shift):
                count = 1
                for _, alike in each:
                    count *= alike
                yield shift, count

    def routes(self, shift: Shift) -> list[Route]:
        """The routes to a rank. Bytes that go halfway around a ring use both directions."""
        node = shift[1:]
        if not any(node):
            return self._inside(shift[0])
        cluster = self.cluster
        network, nics = cluster.network, cluster.nics
        assert network is not None
        latency = nics.latency if nics is not None else 0.0
        base: Draws = {}
        if nics is not None:
            base = {("card out", 0, 0): 1.0, ("card in", 0, 0): 1.0}
        if self._per_byte:
            base["memory", 0, 0] = 2.0 * self._per_byte
        if network.topology in ("ring", "torus"):
            return self._cables(base, node, latency)
        hops = 1
        if network.topology == "mesh":
            base["cable", 0, node[0]] = 1.0
        elif len(node) > 1 and node[1]:
            hops = 3
            base["up", 0, 0] = base["down", 0, 0] = 1.0
        return [Route(1.0, base, latency + hops * network.latency)]

    @property
    def message_bytes(self) -> float:
        """The bytes that a network card could send in the time that it needs for one message."""
        nics = self.cluster.nics
        return 0.0 if nics is None else nics.message * nics.bandwidth

    def ways(self, shift: Shift, axes: Axes) -> tuple[Way, ...]:
        """The routes to one rank, or to all others along some axes."""
        if not axes:
            return tuple(map(_way, self.routes(shift), repeat(1)))
        return _everyone(self.cluster, axes)

    def is_ring(self, axis: int) -> bool:
        """Whether only neighbours along an axis have links to each other."""
        if axis == 0:
            return self.cluster.links.topology == "ring"
        network = self.cluster.network
        return network is not None and network.topology in ("ring", "torus")

    @property
    def _axes(self) -> range:
        return range(len(self.shape))

    def _distances(self, axis: int) -> Iterator[tuple[int, int]]:
        size = self.shape[axis]
        network = self.cluster.network
        yield 0, 1
        if axis and network is not None and network.topology in ("switch", "fat_tree"):
            if size > 1:
                yield 1, size - 1
            return
        for distance in range(1, size):
            yield distance, 1

    def _inside(self, distance: int) -> list[Route]:
        links = self.cluster.links
        base: Draws = {("out", 0, 0): 1.0, ("in", 0, 0): 1.0}
        if self._per_byte:
            base["memory", 0, 0] = 2.0 * self._per_byte
        if links.topology == "switch":
            return [Route(1.0, base, links.latency)]
        if links.topology == "mesh":
            return [Route(1.0, {**base, ("link", 0, distance): 1.0}, links.latency)]
        ways = _ways(distance, links.devices)
        return [
            Route(share, {**base, ("ring", 0, step): float(hops)}, hops * links.latency)
            for share, step, hops in ways
        ]

    def _cables(self, base: Draws, node: Shift, latency: float) -> list[Route]:
        """The route along one axis after another, on the shorter way around each."""
        network = self.cluster.network
        assert network is not None
        found = [Route(1.0, base, latency)]
        for axis, distance in enumerate(node):
            if distance:
                ways = _ways(distance, self.cluster.dims[axis])
                found = [
                    Route(
                        route.share * share,
                        {**route.draws, ("cable", axis, step): float(hops)},
                        route.latency + hops * network.latency,
                    )
                    for route in found
                    for share, step, hops in ways
                ]
        return found


@lru_cache(maxsize=256)
def _everyone(cluster: Cluster, axes: Axes) -> tuple[Way, ...]:
    wiring = Wiring(cluster)
    routed = [(route, n) for shift, n in wiring.shifts(axes) for route in wiring.routes(shift)]
    few = len({(route.latency, *sorted(route.draws.items())) for route, _ in routed}) <= MOST_WAYS
    found: dict[tuple[object, ...], Way] = {}
    for route, count in routed:
        way = _way(route, count)
        key = (way.latency, *sorted(route.draws.items())) if few else (way.latency,)
        known = found.setdefault(key, Way(way.latency, {}, {}))
        for total, part in (
            (known.per_byte, way.per_byte),
            (known.per_message, way.per_message),
        ):
            for name, draw in part.items():
                total[name] = total.get(name, 0.0) + draw
    return tuple(found.values())


def _way(route: Route, count: int) -> Way:
    """`count` such routes. Messages cost time only on network cards."""
    per_byte = {name: draw * route.share * count for name, draw in route.draws.items()}
    per_message = {
        name: draw * count for name, draw in route.draws.items() if name[0].startswith("card")
    }
    return Way(route.latency, per_byte, per_message)


def _ways(distance: int, size: int) -> list[tuple[float, int, int]]:
    """The share, direction and hops of the shorter way around a ring; both ways if they are equally
    long. Two nodes have one link between them, not two.
    """
    up = distance % size
    if size == 2:
        return [(1.0, 1, 1)]
    if 2 * up == size:
        return [(0.5, 1, up), (0.5, -1, up)]
    return [(1.0, 1, up)] if 2 * up < size else [(1.0, -1, size - up)]
