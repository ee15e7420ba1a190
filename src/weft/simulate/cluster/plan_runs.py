"""Simulates a plan on a cluster: as inside a node, but copies between nodes use the network.

Ranks fill one node after another. Copies between nodes use the network cards of both, and the leaf
switches or cables between them. Every rank is simulated, because ranks of a flat plan differ on a
cluster.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from weft.errors import Unsupported
from weft.machine import Cluster
from weft.plan.tasks import Copy, Plan
from weft.simulate.demand import Demands, TransferDemand
from weft.simulate.events import Events
from weft.simulate.node import Draws, Node
from weft.simulate.result import Simulation


def run_plan(plan: Plan, cluster: Cluster) -> Simulation:
    """Simulates a plan whose ranks are all devices of a cluster."""
    check_plan(plan, cluster)
    pieces = _ClusterEvents(plan, cluster).run()
    return Simulation(plan, cluster.device, tuple(pieces), False)


def check_plan(plan: Plan, cluster: Cluster) -> None:
    """Raises, with the reason, if the cluster cannot run the plan."""
    world = plan.operation.world
    if world != cluster.world:
        raise Unsupported(
            f"{plan.operation.label} has {world} ranks; {cluster.name} has {cluster.world} devices"
        )
    needed = [0] * world
    for buffer in plan.buffers:
        needed[buffer.rank] += buffer.num_bytes
    if max(needed, default=0) > cluster.device.memory.capacity:
        raise Unsupported(
            f"{plan.operation.label} with {plan.schedule} needs {max(needed) / 1e9:.1f} GB on each "
            f"rank; a device of {cluster.name} has {cluster.device.memory.capacity / 1e9:.1f} GB"
        )
    if plan.schedule.engine == "direct" and cluster.nodes > 1:
        raise Unsupported("direct reads the memory of peers in place, which no network lets it")


class _ClusterNode(Node):
    """The resources of all nodes, and those between them."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster.device, cluster.world, False)
        self.cluster = cluster
        self._devices = cluster.devices
        nics, network = cluster.nics, cluster.network
        if nics is not None:
            cards = min(nics.count, self._devices)
            self._capacity["card out"] = self._capacity["card in"] = (
                nics.count * nics.bandwidth / cards
            )
            if network is not None:
                up = network.leaf * nics.count * nics.bandwidth / network.oversubscription
                self._capacity["up"] = self._capacity["down"] = up
        if network is not None and network.bandwidth is not None:
            self._capacity["cable"] = network.bandwidth

    def latency(self, source: int, target: int) -> float:
        """The resources that the network adds to a copy."""
        hops = self._path(source // self._devices, target // self._devices)
        network, nics = self.cluster.network, self.cluster.nics
        if network is None or not hops:
            return 0.0
        return (0.0 if nics is None else nics.latency) + len(hops) * network.latency

    def route(self, source: int, target: int, draw: float) -> Draws:
        here, there = source // self._devices, target // self._devices
        if here == there:
            return super().route(source, target, draw)
        network, nics = self.cluster.network, self.cluster.nics
        assert network is not None
        wanted: Draws = []
        if nics is not None:
            wanted = [
                (("card out", here, self._card(source)), draw),
                (("card in", there, self._card(target)), draw),
            ]
        if network.topology == "fat_tree" and here // network.leaf != there // network.leaf:
            wanted += [
                (("up", here // network.leaf, 0), draw),
                (("down", there // network.leaf, 0), draw),
            ]
        elif network.bandwidth is not None:
            wanted += [(("cable", *hop), draw) for hop in self._path(here, there)]
        return wanted

    def _card(self, rank: int) -> int:
        nics = self.cluster.nics
        assert nics is not None
        return rank % self._devices * min(nics.count, self._devices) // self._devices

    def _hops(self, source: int, target: int) -> list[tuple[int, int]]:
        """The hops along the ring of a node. Ranks of other nodes are not on it."""
        first = source - source % self._devices
        stops = _ring(source - first, target - first, self._devices)
        return [(first + one, first + two) for one, two in pairwise(stops)]

    def _path(self, here: int, there: int) -> list[tuple[int, int]]:
        """The hops between two nodes: neighbours along the axes of a torus, or switches."""
        network = self.cluster.network
        if network is None or here == there:
            return []
        if network.topology == "fat_tree" and here // network.leaf != there // network.leaf:
            return [(here, there)] * 3
        if network.topology not in ("ring", "torus"):
            return [(here, there)]
        stops, at, stride = [here], here, 1
        for size in self.cluster.dims:
            row = at - at // stride % size * stride
            for place in _ring(at // stride % size, there // stride % size, size)[1:]:
                at = row + place * stride
                stops.append(at)
            stride *= size
        return list(pairwise(stops))


class _ClusterDemands(Demands):
    def _copy(self, task: Copy) -> TransferDemand:
        found = super()._copy(task)
        assert isinstance(self.node, _ClusterNode)
        more = self.node.latency(task.source.rank, task.target.rank)
        return replace(found, completion=found.completion + more) if more else found


class _ClusterEvents(Events):
    def __init__(self, plan: Plan, cluster: Cluster) -> None:
        after = [task.after for task in plan.tasks]
        super().__init__(plan, cluster.device, plan.tasks, after, False)
        self._node = _ClusterNode(cluster)
        self._demands = _ClusterDemands(plan, self._node)


def _ring(source: int, target: int, size: int) -> list[int]:
    """The stops on the shorter way around."""
    up = (target - source) % size
    step, count = (1, up) if 2 * up <= size else (-1, size - up)
    return [(source + step * hop) % size for hop in range(count + 1)]
