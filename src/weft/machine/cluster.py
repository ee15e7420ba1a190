"""Clusters: many equal nodes and the network between them, described by a TOML file.

A cluster names the machine of its nodes (`machine = "mi300x"`), or describes only the links between
the devices of a node (`[links]`), which is enough to simulate collectives. NICs and a network
connect the nodes. Units are SI: seconds, bytes per second.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, Literal

from weft.errors import Unsupported, nearest
from weft.machine.description import Count, Machine, Positive
from weft.machine.loading import build
from weft.machine.loading import load as load_machine
from weft.machine.loading import names as machine_names
from weft.machine.toml_file import read_toml

_FOLDER = Path(__file__).parent / "clusters"
MOST_NODES = 1 << 16


@dataclass(frozen=True)
class Inside:
    """The links between the devices of one node."""

    devices: Count
    topology: Literal["mesh", "switch", "ring"]
    bandwidth: Positive  # one link, one direction; with a switch, the whole rate out of a device
    latency: float = 0.0  # of a link, or of the path through the switch
    total_bandwidth: Positive | None = None  # the limit over all links of a device

    @property
    def out_of_device(self) -> float:
        """The bandwidth of a device over all its links together."""
        if self.topology == "switch":
            whole = self.bandwidth
        elif self.topology == "mesh":
            whole = (self.devices - 1) * self.bandwidth
        else:
            whole = min(2, self.devices - 1) * self.bandwidth
        return whole if self.total_bandwidth is None else min(whole, self.total_bandwidth)


@dataclass(frozen=True)
class Nics:
    """The network cards of a node, which its devices share evenly."""

    count: Count  # in a node
    bandwidth: Positive  # one card, one direction
    latency: float = 0.0  # from memory to memory through two cards, without switches and cables
    message: float = 0.0  # the time of a card for each message, in addition to its bytes


@dataclass(frozen=True)
class Network:
    """The network between the nodes.

    With a `switch`, every node sends at the rate of its cards. A `fat_tree` has leaf switches with
    `leaf` nodes each; the bandwidth between leaves is 1 / `oversubscription` of the bandwidth of
    the nodes. In a `ring` or `torus`, nodes have a link to each neighbour, in a `mesh` to every
    other node.
    """

    topology: Literal["switch", "fat_tree", "mesh", "ring", "torus"]
    latency: float = 0.0  # of every hop: a switch, or a link of a mesh, ring or torus
    bandwidth: Positive | None = None  # one link, one direction: mesh, ring and torus
    dims: tuple[Count, ...] = ()  # torus: nodes in each direction; otherwise as even as possible
    dimensions: Count = 2  # torus without dims
    leaf: Count = 32  # fat tree: nodes below one leaf switch
    oversubscription: Positive = 1.0  # fat tree


@dataclass(frozen=True)
class Cluster:
    """`nodes` equal nodes. One device represents all, because they are equal."""

    name: str
    title: str
    nodes: Count
    links: Inside
    nics: Nics | None = None
    network: Network | None = None
    machine: Machine | None = None
    start: float = 0.0  # software: starting and ending a collective of a library
    sum_bandwidth: float | None = None  # of memory, for sums, which start when their bytes arrive

    @property
    def devices(self) -> int:
        """The number of devices in a node."""
        return self.links.devices

    @property
    def world(self) -> int:
        return self.nodes * self.devices

    @property
    def dims(self) -> tuple[int, ...]:
        """The nodes as a grid. Every axis is a level of the network."""
        network = self.network
        if self.nodes == 1 or network is None:
            return ()
        if network.topology == "torus":
            return network.dims or _even(self.nodes, network.dimensions)
        if network.topology == "fat_tree" and self.nodes > network.leaf:
            return (network.leaf, self.nodes // network.leaf)
        return (self.nodes,)

    @property
    def nic_bandwidth(self) -> float:
        """The bandwidth of the cards per device; if there are no cards, more than any link has."""
        if self.nics is None:
            return float("inf")
        return self.nics.count * self.nics.bandwidth / self.devices

    @property
    def device(self) -> Machine:
        """The machine of a node, for simulations that need compute."""
        if self.machine is None:
            raise Unsupported(
                f"{self.name} says how devices are joined but not what they are; "
                'give it machine = "mi300x", or another, to simulate compute'
            )
        return self.machine

    def with_nodes(self, nodes: int) -> Cluster:
        """The same cluster with another number of nodes."""
        if nodes == self.nodes:
            return self
        network = self.network
        if network is not None and network.dims and prod(network.dims) != nodes:
            network = replace(network, dims=(), dimensions=len(network.dims))
        found = replace(self, nodes=nodes, network=network)
        _check(found, self.name)
        return found


def cluster_names() -> list[str]:
    """The names of the clusters that come with weft."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def load_cluster(name_or_path: str | Path) -> Cluster:
    """The cluster with that name, or the one that the TOML file at that path describes.

    A machine (by name or file) is a cluster of one node without a network.
    """
    text = str(name_or_path)
    if text in cluster_names():
        return _shipped(text)
    path = Path(name_or_path)
    if os.path.isfile(path):
        return _read(path)
    if path.suffix == ".toml" or len(path.parts) > 1:
        raise Unsupported(f"There is no cluster file {text}.")
    if text in (*machine_names(), "cpu"):
        return of_machine(load_machine(text))
    known = cluster_names()
    raise Unsupported(
        f"There is no cluster or machine named {text!r}{nearest(text, known)};"
        f" known clusters are {', '.join(known)}, and any TOML file by its path."
    )


def of_machine(machine: Machine) -> Cluster:
    """A cluster of one node, without a network."""
    return Cluster(machine.name, machine.title, 1, _inside(machine), machine=machine)


@lru_cache
def _shipped(name: str) -> Cluster:
    return _read(_FOLDER / f"{name}.toml")


def _read(path: Path) -> Cluster:
    table = read_toml(path)
    if "compute" in table:
        return of_machine(load_machine(path))
    beside = path.parent / str(table.get("machine"))
    # The file of a node, relative to this file.
    if beside.suffix == ".toml" and os.path.isfile(beside):
        table["machine"] = str(beside)
    return cluster_from_table({"name": path.stem, "title": path.stem, **table}, path.name)


@dataclass(frozen=True)
class _File:
    """The contents of a file."""

    name: str
    title: str
    nodes: Count
    machine: str | None = None
    links: Inside | None = None
    nics: Nics | None = None
    network: Network | None = None
    start: float = 0.0
    sum_bandwidth: Positive | None = None


def cluster_from_table(table: dict[str, Any], where: str = "cluster") -> Cluster:
    """A cluster from nested dictionaries, with the same checks as for a file."""
    given = build(_File, table, where)
    machine = None if given.machine is None else load_machine(given.machine)
    if machine is None and given.links is None:
        raise Unsupported(
            f"{where}: give machine, or [links] to say how a node's devices are joined."
        )
    links = given.links or _inside(machine)  # type: ignore[arg-type]
    found = Cluster(
        given.name,
        given.title,
        given.nodes,
        links,
        given.nics,
        given.network,
        machine,
        given.start,
        given.sum_bandwidth,
    )
    _check(found, where)
    return found


def _inside(machine: Machine) -> Inside:
    links = machine.links
    one = links.total_bandwidth if links.topology == "switch" else links.bandwidth
    return Inside(links.world, links.topology, one, links.latency, links.total_bandwidth)


def _check(cluster: Cluster, where: str) -> None:
    """Raises unless the sections fit each other."""
    nodes, network = cluster.nodes, cluster.network
    if not 1 <= nodes <= MOST_NODES:
        raise Unsupported(f"{where}: a cluster has 1 to {MOST_NODES} nodes, not {nodes}.")
    if nodes == 1:
        return
    if network is None:
        raise Unsupported(f"{where}: {nodes} nodes need a [network] between them.")
    cabled = network.topology in ("mesh", "ring", "torus")
    if cabled and network.bandwidth is None:
        raise Unsupported(f"{where}: network.bandwidth of a {network.topology}'s links is missing.")
    if not cabled and cluster.nics is None:
        raise Unsupported(f"{where}: a network with switches needs [nics].")
    if network.topology == "torus" and max(len(network.dims), network.dimensions) > 6:
        raise Unsupported(f"{where}: a torus has at most 6 dimensions.")
    if network.topology == "torus" and network.dims and prod(network.dims) != nodes:
        raise Unsupported(
            f"{where}: network.dims {list(network.dims)} make {prod(network.dims)} nodes,"
            f" not {nodes}."
        )
    if network.topology == "fat_tree":
        if network.oversubscription < 1.0:
            raise Unsupported(f"{where}: network.oversubscription must be at least 1.")
        if nodes > network.leaf and nodes % network.leaf:
            raise Unsupported(
                f"{where}: {nodes} nodes do not fill leaf switches of {network.leaf} each;"
                " a multiple would."
            )


def _even(nodes: int, dimensions: int) -> tuple[int, ...]:
    """The number of nodes as a product of factors that are as even as possible, in rising order."""
    dims: list[int] = []
    left = nodes
    for remaining in range(dimensions, 0, -1):
        if remaining == 1:
            dims.append(left)
            break
        root = round(left ** (1.0 / remaining))
        size = next(n for n in range(max(root, 1), 0, -1) if left % n == 0)
        dims.append(size)
        left //= size
    return tuple(sorted(size for size in dims if size > 1)) or (nodes,)
