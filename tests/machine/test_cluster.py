"""Clusters from TOML: what they say, and plain refusals of what cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.errors import Unsupported
from weft.machine import cluster_from_table, cluster_names, load, load_cluster
from weft.machine.cluster import _even

SMALL = """
nodes = 4
[links]
devices = 2
topology = "ring"
bandwidth = 1e10
[nics]
count = 1
bandwidth = 5e9
[network]
topology = "switch"
latency = 1e-6
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", cluster_names())
def test_shipped_clusters_are_whole(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.device == load(name)
    assert cluster.world == cluster.nodes * cluster.links.devices
    assert cluster.nics is not None
    assert cluster.nic_bandwidth == pytest.approx(cluster.nics.bandwidth)  # a card per device
    assert cluster.with_nodes(128).world == 1024


def test_a_file_of_links_alone(tmp_path: Path) -> None:
    cluster = load_cluster(write(tmp_path, SMALL))
    assert (cluster.name, cluster.world, cluster.dims) == ("mine", 8, (4,))
    assert cluster.nic_bandwidth == 2.5e9  # two devices share the card
    assert cluster.links.out_of_device == 1e10  # two devices have one link, not two
    with pytest.raises(Unsupported, match=r'mine says .* give it machine = "mi300x"'):
        _ = cluster.device


def test_a_machine_is_a_cluster_of_one_node(tmp_path: Path) -> None:
    source = Path(load.__code__.co_filename).parent / "h100.toml"
    (tmp_path / "node.toml").write_text(source.read_text())
    assert load_cluster(tmp_path / "node.toml").nodes == 1
    text = 'machine = "node.toml"\nnodes = 2\n[nics]\ncount = 8\nbandwidth = 5e10\n'
    cluster = load_cluster(write(tmp_path, text + '[network]\ntopology = "switch"\n'))
    assert cluster.device.name == "node"  # named as seen from the cluster's file


def test_the_grid_of_a_network() -> None:
    torus = {"topology": "torus", "bandwidth": 1e10}
    table = {"name": "t", "title": "t", "nodes": 12, "links": LINKS, "network": torus}
    assert cluster_from_table(table).dims == (3, 4)
    assert cluster_from_table({**table, "network": {**torus, "dims": [2, 6]}}).dims == (2, 6)
    assert cluster_from_table({**table, "network": {**torus, "dims": [12]}}).with_nodes(8).dims == (
        8,
    )
    assert cluster_from_table({**table, "nodes": 1}).dims == ()
    assert [_even(n, 3) for n in (64, 1024, 7)] == [(4, 4, 4), (8, 8, 16), (7,)]


LINKS = {"devices": 1, "topology": "switch", "bandwidth": 1e12}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("nodes = 4", "nodes = 0"), "nodes must be more than 0"),
        (("nodes = 4", "nodes = 99999"), "a cluster has 1 to 65536 nodes"),
        (("count = 1", "cuont = 1"), "unknown key nics.cuont (did you mean count"),
        (('"switch"', '"star"'), "network.topology must be switch or fat_tree or mesh"),
        (('"switch"', '"ring"'), "network.bandwidth of a ring's links is missing"),
        (('"switch"', '"torus"\nbandwidth = 1e9\ndims = [3, 3]'), "[3, 3] make 9 nodes, not 4"),
        (('"switch"', '"torus"\nbandwidth = 1e9\ndims = 3'), "dims must be a list of numbers"),
        (('"switch"', '"fat_tree"\nleaf = 3'), "4 nodes do not fill leaf switches of 3 each"),
        (('"switch"', '"fat_tree"\noversubscription = 0.5'), "must be at least 1"),
        (("[nics]\ncount = 1\nbandwidth = 5e9\n", ""), "a network with switches needs [nics]"),
        (('[network]\ntopology = "switch"\nlatency = 1e-6', ""), "4 nodes need a [network]"),
        (("bandwidth = 5e9", "bandwidth = -5e9"), "nics.bandwidth must not be negative"),
        (("nodes = 4", 'nodes = 4\nmachine = "mi300"'), "no machine named 'mi300'"),
        (("nodes = 4", "nodes = "), "mine.toml is not a TOML file"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    assert change[0] in SMALL
    with pytest.raises(Unsupported) as error:
        load_cluster(write(tmp_path, SMALL.replace(*change, 1)))
    assert words in str(error.value)


def test_names_that_are_not_there() -> None:
    with pytest.raises(Unsupported, match="did you mean mi300x"):
        load_cluster("mi300")
    with pytest.raises(Unsupported, match=r"There is no cluster file none\.toml"):
        load_cluster("none.toml")
    with pytest.raises(Unsupported, match="give machine, or"):
        cluster_from_table({"name": "t", "title": "t", "nodes": 1})
