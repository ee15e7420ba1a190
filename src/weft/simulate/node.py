"""The shared resources of a node, and those that a transfer between two ranks uses.

    memory   of every device, shared by its kernels and by the copies that read or write it
    out, in  all bytes that leave or enter a device
    link     mesh: one per ordered pair; ring: one per hop and direction; a switch has none
    engine   of every device; lanes share one if there are fewer engines than lanes
    driven   all core-driven transfers out of a device

If all ranks do the same, shifted around the node, then one rank represents all (`folded`).
Resources that a shift maps onto each other become one, and rank 0 draws on it for itself and for
the ranks that it represents.
"""

from __future__ import annotations

from itertools import pairwise

from weft.machine import Machine
from weft.simulate.cost import bandwidth_of
from weft.simulate.sharing import Resource

Name = tuple[str, int, int]
"""The kind, the rank, and for links the other rank, for engines the number of the engine."""

Draws = list[tuple[Name, float]]


class Node:
    """The resources of `world` devices of a machine, each made when it is first used."""

    def __init__(self, machine: Machine, world: int, folded: bool) -> None:
        self.machine = machine
        self.world = world
        self.folded = folded
        self._resources: dict[Name, Resource] = {}
        self._bandwidths: dict[int, float] = {}
        self._ports: dict[int, list[tuple[Resource, float]]] = {}
        best = max(protocol.bandwidth for protocol in machine.cores.protocols)
        reach = machine.links.out_of_device(world) / machine.links.out_of_device(
            machine.links.world
        )
        self._capacity = {
            "memory": machine.memory.bandwidth,
            "out": machine.links.total_bandwidth,
            "in": machine.links.total_bandwidth,
            "link": machine.links.bandwidth,
            "engine": 1.0,
            "driven": best * reach,
        }

    def memory(self, rank: int) -> Resource:
        return self._resource(("memory", rank, 0))

    def driven(self, rank: int) -> Resource:
        return self._resource(("driven", rank, 0))

    def ports(self, rank: int) -> list[tuple[Resource, float]]:
        """The port that all bytes leaving or entering a device pass, with its capacity."""
        found = self._ports.get(rank)
        if found is None:
            names: tuple[Name, ...] = (("out", rank, 0), ("in", rank, 0))
            found = [(self._resource(name), self._capacity[name[0]]) for name in names]
            self._ports[rank] = found
        return found

    @property
    def driven_bandwidth(self) -> float:
        """The bandwidth of core-driven transfers out of a device that have the units they need."""
        return self._capacity["driven"]

    def memory_bandwidth(self, units: int) -> float:
        """The bandwidth of a memory for kernels and copies together, with this many units."""
        known = self._bandwidths.get(units)
        if known is None:
            known = max(self.machine.memory.bandwidth, bandwidth_of(self.machine, units))
            self._bandwidths[units] = known
        return known

    def draws(self, wanted: Draws) -> tuple[tuple[Resource, float], ...]:
        """The resources of (name, draw) pairs. Draws on the same resource are added."""
        total: dict[Resource, float] = {}
        for name, draw in wanted:
            resource = self._resource(name)
            total[resource] = total.get(resource, 0.0) + draw
        return tuple((resource, draw) for resource, draw in total.items() if draw > 0.0)

    def route(self, source: int, target: int, draw: float) -> Draws:
        """The resources of a transfer from one rank to another, besides memory."""
        ports: Draws = [(("out", source, 0), draw), (("in", target, 0), draw)]
        topology = self.machine.links.topology
        if topology == "mesh":
            return [*ports, (("link", source, target), draw)]
        if topology == "ring":
            return [*ports, *((("link", *hop), draw) for hop in self._hops(source, target))]
        return ports

    def engine(self, rank: int, peer: int, seconds_per_byte: float) -> Draws:
        """The engine of the lane to a peer. It transfers one byte at a time."""
        index = (peer - rank) % self.world % self.machine.engines.count
        return [(("engine", rank, index), seconds_per_byte)]

    def _hops(self, source: int, target: int) -> list[tuple[int, int]]:
        """The pairs of neighbours on the shorter way around; upwards if both are equally long."""
        up = (target - source) % self.world
        step, count = (1, up) if 2 * up <= self.world else (-1, self.world - up)
        stops = [(source + step * hop) % self.world for hop in range(count + 1)]
        return list(pairwise(stops))

    def _resource(self, name: Name) -> Resource:
        if self.folded:
            name = self._fold(name)
        resource = self._resources.get(name)
        if resource is None:
            resource = Resource(name, self._capacity[name[0]], queued=name[0] == "memory")
            self._resources[name] = resource
        return resource

    def _fold(self, name: Name) -> Name:
        kind, rank, other = name
        return (kind, 0, (other - rank) % self.world if kind == "link" else other)
