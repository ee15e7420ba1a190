"""The checks of simulated clusters: distance to the bound, fair sharing, agreement with another
simulator, and speed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from weft.machine import Cluster, cluster_from_table, load_cluster, measurements
from weft.plan.collective import UNROOTED
from weft.simulate.cluster import CollectiveAnswer, ask, together

GIB = 1 << 30
INSIDE = ("mesh", "switch", "ring")
BETWEEN = ("switch", "fat_tree", "ring", "torus")
NODES = (1, 2, 4, 16)
LARGE = 16 * GIB
"""Bytes that are so many that latency does not matter."""


def sample(inside: str, between: str, nodes: int) -> Cluster:
    """A cluster with round numbers: nodes of 8 devices with links of 50 GB/s (300 GB/s to a
    switch), and a network card of 50 GB/s per device, or links of 100 GB/s to each neighbouring
    node."""
    network: dict[str, object] = {"topology": between, "latency": 5e-7}
    if between == "fat_tree":
        network |= {"leaf": 4, "oversubscription": 2.0}
    elif between != "switch":
        network["bandwidth"] = 1e11
    return cluster_from_table(
        {
            "name": f"{inside}-{between}",
            "title": f"{inside} inside, {between} between",
            "nodes": nodes,
            "links": {
                "devices": 8,
                "topology": inside,
                "bandwidth": 3e11 if inside == "switch" else 5e10,
                "latency": 1e-6,
            },
            "nics": {"count": 8, "bandwidth": 5e10, "latency": 2e-6},
            "network": network,
        }
    )


def near_the_bound() -> Iterator[CollectiveAnswer]:
    """The fastest algorithm for every collective on every kind of cluster, at a large size."""
    for inside in INSIDE:
        for between in BETWEEN:
            for nodes in NODES:
                if nodes == 1 and between != BETWEEN[0]:
                    continue  # a single node has no network
                for kind in UNROOTED:
                    yield ask(sample(inside, between, nodes), kind, LARGE)[0]


@dataclass(frozen=True)
class ConcurrentPair:
    """The times of two concurrent collectives, and their times under fair sharing."""

    what: str
    seconds: tuple[float, float]
    fair: tuple[float, float]

    @property
    def error(self) -> float:
        """The larger of the two errors, as a share."""
        return max(abs(s / f - 1.0) for s, f in zip(self.seconds, self.fair, strict=True))


def fairness() -> list[ConcurrentPair]:
    """Pairs of collectives with equal and different sizes and kinds on one cluster. While both run,
    each should have half of the link that both need."""
    cluster = sample("mesh", "switch", 16)

    def pair(
        what: str, one: tuple[str, float, str], other: tuple[str, float, str]
    ) -> ConcurrentPair:
        alone = [ask(cluster, *asked, 1)[0].seconds for asked in (one, other)]
        both = together(cluster, [(*one, 1), (*other, 1)])
        short = min(alone)
        fair = [2.0 * s if s == short else s + short for s in alone]
        return ConcurrentPair(what, (both[0], both[1]), (fair[0], fair[1]))

    exchange = ("all_to_all", 8.0 * GIB, "direct")
    return [
        pair("two equal all-to-alls", exchange, exchange),
        pair("all-to-all, one of a quarter", exchange, ("all_to_all", 2.0 * GIB, "direct")),
        pair("all-to-all, direct all-gather", exchange, ("all_gather", GIB, "direct")),
        pair("two equal all-gathers", ("all_gather", GIB, "direct"), ("all_gather", GIB, "direct")),
    ]


@dataclass(frozen=True)
class Compared:
    """The seconds of a collective in weft's simulator and in ASTRA-sim."""

    what: str
    theirs: float
    ours: float

    @property
    def error(self) -> float:
        return self.ours / self.theirs - 1.0


def against_astra_sim() -> list[Compared]:
    """Simulates the networks and algorithms of reference/astra_sim_collectives.csv.

    There, the hops to and from a switch take 1,000 ns together, links are in GiB/s, a sum is two
    reads and one write of memory after each round, 4 chunks pass through the dimensions in order,
    and rings go one way.
    """
    found = []
    for row in measurements("astra_sim_collectives"):
        dims = [int(size) for size in row["shape"].split("x")]
        nodes = 1
        for size in dims:
            nodes *= size
        table: dict[str, object] = {
            "name": "theirs",
            "title": row["topology"],
            "nodes": nodes,
            "links": {"devices": 1, "topology": "switch", "bandwidth": 1e15},
            "sum_bandwidth": 1.6e12,
        }
        if row["topology"] == "switch":
            table["nics"] = {"count": 1, "bandwidth": 50.0 * GIB}
            table["network"] = {"topology": "switch", "latency": 1.01e-6}
        else:
            table["network"] = {
                "topology": "torus",
                "dims": dims,
                "bandwidth": 50.0 * GIB,
                "latency": 5.1e-7,
            }
        kind = row["collective"]
        total = float(row["bytes"]) * (nodes if kind == "all_gather" else 1)
        ours = ask(cluster_from_table(table), kind, total, "in-order:one-way", 4)[0].seconds
        what = f"{kind} {row['topology']} {row['shape']}, 2^{int(row['bytes']).bit_length() - 1} B"
        found.append(Compared(what, float(row["ns"]) * 1e-9, ours))
    return found


def how_long(nodes: int) -> float:
    """The seconds to simulate all collectives with all algorithms on `nodes` nodes of 8 devices."""
    cluster = load_cluster("mi300x").with_nodes(nodes)
    start = time.process_time()  # other processes may share the cores
    for kind in UNROOTED:
        ask(cluster, kind, GIB)
    return time.process_time() - start
