"""The lower bound of all algorithms: the bytes that must cross a link, divided by its bandwidth.

Every cut of the cluster gives a bound: around a device, around a node, around the nodes of a leaf
switch, and for an all-to-all over rings the links that bytes must follow.
"""

from __future__ import annotations

from weft.machine import Cluster
from weft.plan.collective import find_kind


def bound(cluster: Cluster, kind: str, total: float) -> tuple[float, str]:
    """The least seconds of a collective, and the link that determines them."""
    cuts = dict(_cuts(cluster, kind, total))
    if not cuts:
        return 0.0, "nothing to move"
    slowest = max(cuts, key=lambda name: cuts[name])
    return find_kind(kind).phases * cuts[slowest], slowest


def _cuts(cluster: Cluster, kind: str, total: float) -> list[tuple[str, float]]:
    world, devices, nodes = cluster.world, cluster.devices, cluster.nodes
    if world == 1 or total <= 0.0:
        return []
    links, network = cluster.links, cluster.network
    cards = cluster.nic_bandwidth if nodes > 1 else 0.0
    cables = _cables(cluster) / devices  # the device's part of the links of its node
    between = min(cards, cables) if nodes > 1 else 0.0
    inside = links.out_of_device if devices > 1 else 0.0
    found = [("links of a device", total * (world - 1) / world / (inside + between))]
    if nodes > 1:
        crossing = total * (nodes - 1) / nodes
        # In an all-to-all every device sends this much; in a gather a node needs it only once.
        if kind != "all_to_all":
            crossing /= devices
        which = "network cards" if cards <= cables else "links between nodes"
        found.append((which, crossing / between))
    if network is not None and network.topology == "fat_tree" and nodes > network.leaf:
        leaves = nodes // network.leaf
        up = cluster.nic_bandwidth / network.oversubscription
        above = total * (leaves - 1) / leaves
        if kind != "all_to_all":
            above /= devices * network.leaf
        found.append(("links above leaf switches", above / up))
    if kind == "all_to_all":
        found += _rings(cluster, total)
    return found


def _cables(cluster: Cluster) -> float:
    """The total bandwidth of the links of a node to its neighbours."""
    network = cluster.network
    if network is None or network.bandwidth is None:
        return float("inf")
    if network.topology == "mesh":
        return (cluster.nodes - 1) * network.bandwidth
    return sum(min(2, size - 1) for size in cluster.dims) * network.bandwidth


def _rings(cluster: Cluster, total: float) -> list[tuple[str, float]]:
    """An all-to-all over rings: the hops of all bytes, divided by the links of a rank."""
    found = []
    links, network = cluster.links, cluster.network
    if links.topology == "ring" and links.devices > 1:
        hops = _hops(links.devices) * total / cluster.world
        found.append(("links of the ring", hops / (min(2, links.devices - 1) * links.bandwidth)))
    if network is not None and network.bandwidth and network.topology in ("ring", "torus"):
        for size in cluster.dims:
            carried = _hops(size) * total / size * cluster.devices
            found.append(("links between nodes", carried / (min(2, size - 1) * network.bandwidth)))
    return found


def _hops(size: int) -> float:
    """The total number of hops to all others of a ring."""
    return float(sum(min(far, size - far) for far in range(1, size)))
