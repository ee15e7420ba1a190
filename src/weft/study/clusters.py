"""What weft promises of clusters: near the bound, fair, as another simulator says, and quick."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from weft.machine import Cluster, cluster_from_table, load_cluster, measurements
from weft.plan.collective import UNROOTED
from weft.simulate.cluster import Answer, ask, together

GIB = 1 << 30
INSIDE = ("mesh", "switch", "ring")
BETWEEN = ("switch", "fat_tree", "ring", "torus")
NODES = (1, 2, 4, 16)
LARGE = 16 * GIB
"""So large that latency does not count."""


def sample(inside: str, between: str, nodes: int) -> Cluster:
    """Nodes of 8 devices in round numbers: links of 50 GB/s (300 GB/s to a switch), a card of 50
    GB/s for every device, or cables of 100 GB/s to each neighbouring node."""
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


def near_the_bound() -> Iterator[Answer]:
    """The quickest algorithm of every collective on every kind of cluster, at a large size."""
    for inside in INSIDE:
        for between in BETWEEN:
            for nodes in NODES:
                if nodes == 1 and between != BETWEEN[0]:
                    continue  # there is nothing between
                for kind in UNROOTED:
                    yield ask(sample(inside, between, nodes), kind, LARGE)[0]


@dataclass(frozen=True)
class ConcurrentPair:
    """Two collectives at once, and how long each should take if they share fairly."""

    what: str
    seconds: tuple[float, float]
    fair: tuple[float, float]

    @property
    def error(self) -> float:
        """The larger of both errors, as a share."""
        return max(abs(s / f - 1.0) for s, f in zip(self.seconds, self.fair, strict=True))


def fairness() -> list[ConcurrentPair]:
    """Collectives of equal and unequal sizes and kinds on one cluster: on the link that both need,
    each has half for as long as both are there."""
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
    """A collective here and in ASTRA-sim, in seconds."""

    what: str
    theirs: float
    ours: float

    @property
    def error(self) -> float:
        return self.ours / self.theirs - 1.0


def against_astra_sim() -> list[Compared]:
    """The same networks and algorithms as in reference/astra_sim_collectives.csv.

    A hop to a switch and one from it make 1,000 ns; links are in GiB/s; sums are two reads and a
    write of memory after each round; 4 chunks go through the dimensions in order, rings one way.
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
    """Seconds of this computer for all collectives by all algorithms on so many nodes of 8."""
    cluster = load_cluster("mi300x").with_nodes(nodes)
    start = time.process_time()  # other work may share the cores
    for kind in UNROOTED:
        ask(cluster, kind, GIB)
    return time.process_time() - start
