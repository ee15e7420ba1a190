"""Collectives on clusters: textbook times, the bound, fairness, and another simulator."""

from __future__ import annotations

import time
from itertools import product

import pytest

from weft.errors import Unsupported
from weft.machine import Cluster, cluster_from_table, load_cluster
from weft.simulate.cluster import ask, bound, together
from weft.study.clusters import GIB, against_astra_sim, fairness, sample

MIB = 1 << 20
LATENCY, RATE = 2e-6, 1e10
GATHERS = ("all_gather", "reduce_scatter")


def flat(topology: str, devices: int, **more: object) -> Cluster:
    """One level: devices of a single node."""
    links = {"devices": devices, "topology": topology, "bandwidth": RATE, "latency": LATENCY}
    return cluster_from_table({"name": "f", "title": "f", "nodes": 1, "links": links, **more})


def seconds(cluster: Cluster, kind: str, size: float, algorithm: str, chunks: int = 1) -> float:
    return ask(cluster, kind, size, algorithm, chunks)[0].seconds


@pytest.mark.parametrize("n", [2, 3, 5, 8, 64])
@pytest.mark.parametrize("size", [64.0, 1e6, 1e9])
def test_alpha_and_beta_behind_a_switch(n: int, size: float) -> None:
    """The usual closed forms: rounds x latency + bytes / bandwidth."""
    cluster = flat("switch", n)
    wire = size * (n - 1) / n / RATE
    for kind, times in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
        assert seconds(cluster, kind, size, "direct") == pytest.approx(times * (LATENCY + wire))
        for ring in ("ring", "one-way"):
            expected = times * ((n - 1) * LATENCY + wire)
            assert seconds(cluster, kind, size, ring) == pytest.approx(expected)
        if n & (n - 1) == 0:
            expected = times * ((n.bit_length() - 1) * LATENCY + wire)
            assert seconds(cluster, kind, size, "halving-doubling") == pytest.approx(expected)
    assert seconds(cluster, "all_to_all", size, "direct") == pytest.approx(LATENCY + wire)


def test_a_ring_of_links_both_ways_and_one_way() -> None:
    cluster, size = flat("ring", 8), 1e9
    one_way = 7 * (LATENCY + size / 8 / RATE)
    assert seconds(cluster, "all_gather", size, "one-way") == pytest.approx(one_way)
    both = 7 * (LATENCY + size / 16 / RATE)
    assert seconds(cluster, "all_gather", size, "ring") == pytest.approx(both)
    # Direct, bytes make 1 + 2 + 3 + 2 hops in each direction (those half-way round take both).
    loaded = 8 * size / 8 / RATE
    assert seconds(cluster, "all_to_all", size, "direct") == pytest.approx(loaded, rel=1e-3)
    # Passed on from neighbour to neighbour they make as many.
    assert seconds(cluster, "all_to_all", size, "ring") == pytest.approx(loaded, rel=1e-3)


def test_a_mesh_uses_one_link_or_all() -> None:
    cluster, size = flat("mesh", 8), 1e9
    assert seconds(cluster, "all_gather", size, "direct") == pytest.approx(
        LATENCY + size / 8 / RATE
    )
    ratio = seconds(cluster, "all_gather", size, "one-way") / seconds(
        cluster, "all_gather", size, "direct"
    )
    assert ratio == pytest.approx(7, rel=1e-3)


def test_a_tree_pays_latency_by_its_depth() -> None:
    cluster = sample("switch", "switch", 16)
    small = ask(cluster, "all_reduce", 8.0, "tree", 1)[0].seconds
    ring = ask(cluster, "all_reduce", 8.0, "hierarchical:ring", 1)[0].seconds
    # Inside one latency each way; between, 2 x 4 levels of (card 2 us + switch 0.5 us).
    assert small == pytest.approx(2 * 1e-6 + 8 * 2.5e-6, rel=0.01)
    assert ring == pytest.approx(14 * 1e-6 + 30 * 2.5e-6, rel=0.01)


def test_cards_are_shared_and_levels_added_up() -> None:
    """Hierarchical in one chunk: the network's part, then the node's."""
    links = {"devices": 4, "topology": "switch", "bandwidth": 1e11}
    nics = {"count": 2, "bandwidth": 1e10}
    table = {"name": "c", "title": "c", "nodes": 8, "links": links, "nics": nics}
    cluster = cluster_from_table({**table, "network": {"topology": "switch"}})
    size = 1e9
    between = size / 4 * 7 / 8 / (2 * 1e10 / 4)
    inside = size * 3 / 4 / 1e11
    for kind in GATHERS:
        found = seconds(cluster, kind, size, "hierarchical")
        assert found == pytest.approx(between + inside)
        # In chunks, one level works on one while the other has the next.
        piped = seconds(cluster, kind, size, "hierarchical", 50)
        assert piped == pytest.approx(max(between, inside) + min(between, inside) / 50)
    assert seconds(cluster, "all_to_all", size, "direct") == pytest.approx(
        size * 28 / 32 / (2 * 1e10 / 4)
    )


def test_oversubscription_holds_what_leaves_a_leaf() -> None:
    def tree(over: float) -> Cluster:
        network = {"topology": "fat_tree", "leaf": 4, "oversubscription": over}
        links = {"devices": 1, "topology": "switch", "bandwidth": 1e12}
        nics = {"count": 1, "bandwidth": 1e10}
        table = {"name": "o", "title": "o", "nodes": 16, "links": links, "nics": nics}
        return cluster_from_table({**table, "network": network})

    size = 1e9
    assert seconds(tree(1), "all_to_all", size, "direct") == pytest.approx(size * 15 / 16 / 1e10)
    # 12 of 16 pieces leave the leaf, at a quarter of the rate.
    assert seconds(tree(4), "all_to_all", size, "direct") == pytest.approx(size * 12 / 16 / 2.5e9)
    # Gathered leaf by leaf, only a quarter of the bytes must come from above, once per leaf.
    gathered = ask(tree(4), "all_gather", size)[0]
    assert gathered.over_bound < 1.05


@pytest.mark.parametrize("inside", ["mesh", "switch", "ring"])
def test_near_the_bound_of_the_slowest_link(inside: str) -> None:
    for between, nodes in product(("switch", "ring"), (1, 3, 16)):
        for kind in ("all_gather", "all_to_all"):
            best = ask(sample(inside, between, nodes), kind, 16 * GIB)[0]
            assert 1.0 - 1e-9 <= best.over_bound < 1.05, (between, nodes, kind, best.algorithm)


def test_nothing_beats_the_bound() -> None:
    for inside, between, nodes in product(("mesh", "ring"), ("torus", "fat_tree"), (8,)):
        for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
            for size in (1.0, 1e9):
                for answer in ask(sample(inside, between, nodes), kind, size):
                    assert answer.over_bound >= 1.0 - 1e-9, (inside, between, kind, answer)


def test_the_bound_names_its_link() -> None:
    cluster = load_cluster("mi300x").with_nodes(16)
    time_, which = bound(cluster, "all_to_all", 1e9)
    assert which == "network cards"
    assert time_ == pytest.approx(1e9 * 15 / 16 / 4.85e10)
    assert bound(cluster.with_nodes(1), "all_gather", 1e9)[1] == "links of a device"
    assert bound(flat("switch", 1), "all_gather", 1e9)[0] == 0.0


def test_two_collectives_share_fairly() -> None:
    for pair in fairness():
        assert pair.error < 0.01, pair.what


def test_collectives_on_other_links_do_not_meet() -> None:
    """A flat exchange between nodes and one inside them, both beside each other."""
    cluster = sample("mesh", "switch", 4)
    between = ask(cluster, "all_reduce", 1e9, "tree", 1)[0].seconds
    both = together(cluster, [("all_reduce", 1e9, "tree", 1), ("all_reduce", 1e9, "tree", 1)])
    assert max(both) < 2.0 * between  # while one sums inside, the other has the network
    assert min(both) >= between


def test_another_simulator_says_the_same() -> None:
    compared = against_astra_sim()
    assert len(compared) == 23
    for row in compared:
        assert abs(row.error) < 0.005, row.what


def test_halving_doubling_over_a_ring_crosses_the_middle() -> None:
    """Pairs 4, 2 and 1 apart, with 1, 2 and 4 shards: 4 flows meet half-way round (each way half
    of them), then 2, then 1."""
    shard = 1e9 / 8
    expected = (4 * 0.5 * 1 + 2 * 2 + 1 * 4) * shard / RATE
    found = seconds(flat("ring", 8), "all_gather", 1e9, "halving-doubling")
    assert found == pytest.approx(expected, rel=1e-3)


def test_thousands_of_devices_take_no_time() -> None:
    cluster = load_cluster("mi300x").with_nodes(1024)
    start = time.process_time()
    best = ask(cluster, "all_to_all", 1e9)[0]
    ring = ask(cluster, "all_reduce", 1e9, "ring")[0]
    assert time.process_time() - start < 5
    assert best.ran.events < 5000
    assert ring.ran.events < 2000  # 2 x 8,191 rounds, in steps
    assert ring.seconds > 2 * 8191 * 1.5e-6


def test_steps_of_many_rounds_take_as_long_as_the_rounds() -> None:
    n, size = 1000, 1e8
    expected = (n - 1) * (LATENCY + size / n / RATE)
    assert seconds(flat("switch", n), "all_gather", size, "one-way") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "algorithm", "words"),
    [
        ("all_gathr", "auto", "no collective 'all_gathr' (did you mean all_gather"),
        ("all_gather", "rings", "no algorithm 'rings' (did you mean ring"),
        ("all_gather", "hierarchical:fast", "no level does 'fast'"),
        ("all_gather", "hierarchical:ring+ring+ring", "name one algorithm for all levels, or two"),
        ("all_gather", "ring:direct", "ring takes no levels"),
        ("all_gather", "halving-doubling", "needs a power of two on every level, not 3"),
        ("all_to_all", "ring", "all_to_all over several levels has no ring"),
        ("all_to_all", "mixed", "all_to_all is not mixed"),
    ],
)
def test_what_cannot_be_done_is_said(kind: str, algorithm: str, words: str) -> None:
    with pytest.raises(Unsupported) as error:
        ask(sample("mesh", "switch", 3), kind, MIB, algorithm)
    assert words in str(error.value)


def test_nothing_to_move_takes_no_time() -> None:
    assert ask(sample("mesh", "switch", 2), "all_gather", 0.0)[0].seconds == 0.0
    assert ask(flat("switch", 1), "all_reduce", 1e9)[0].seconds == 0.0
    with pytest.raises(Unsupported, match="cannot move"):
        ask(flat("switch", 2), "all_gather", -1.0)
    with pytest.raises(Unsupported, match="cannot move"):
        ask(flat("switch", 2), "all_gather", float("nan"))
