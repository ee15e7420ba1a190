"""Plans on clusters: as in a node where there is one, and over cards and cables between nodes."""

from __future__ import annotations

import pytest

from weft.errors import Unsupported
from weft.machine import Cluster, cluster_from_table, load, load_cluster
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.plan.all_to_all_matmul import AllToAllMatmul
from weft.schedule import Schedule
from weft.simulate import run
from weft.simulate.cluster import run_plan
from weft.simulate.cluster.plan_runs import _ClusterNode
from weft.study.cluster_plans import explore_plans
from weft.study.scenarios import Shape

SERIAL = Schedule.parse("serial@dma")


def cluster(nodes: int, **network: object) -> Cluster:
    table = {"name": "c", "title": "c", "nodes": nodes, "machine": "mi300x"}
    nics = {"count": 8, "bandwidth": 1e10}
    return cluster_from_table({**table, "nics": nics, "network": network})


@pytest.mark.parametrize("name", ["serial@cores", "shard-p2p@dma", "adaptive@dma"])
def test_one_node_is_a_machine(name: str) -> None:
    plan = AllGatherMatmul.of(4096, 512, 2048, 8, "bfloat16").lower(Schedule.parse(name))
    alone = run(plan, load("mi300x"), fold=False).seconds
    assert run_plan(plan, load_cluster("mi300x").with_nodes(1)).seconds == pytest.approx(alone)


def test_copies_between_nodes_share_the_cards() -> None:
    operation = AllGatherMatmul.of(2048, 64, 8192, 16, "bfloat16")
    simulation = run_plan(operation.lower(SERIAL), cluster(2, topology="switch"))
    shard = 2048 / 16 * 8192 * 2
    between = max(p.end for p in simulation.pieces if p.task.kind == "copy")
    assert between == pytest.approx(8 * shard / 1e10, rel=0.02)  # 8 shards through each card
    inside = min(p.end for p in simulation.pieces if p.task.rank == 0 and p.task.lane == "engine 1")
    assert inside < between / 4


def test_oversubscription_slows_what_crosses_leaves() -> None:
    plan = AllToAllMatmul.of(4096, 64, 4096, 32, "bfloat16").lower(SERIAL)
    full = run_plan(plan, cluster(4, topology="fat_tree", leaf=2)).seconds
    half = run_plan(plan, cluster(4, topology="fat_tree", leaf=2, oversubscription=4.0)).seconds
    assert half > 1.8 * full


def test_the_way_through_a_torus() -> None:
    node = _ClusterNode(cluster(12, topology="torus", dims=[3, 4], bandwidth=1e10, latency=1e-6))
    # Node 0 is (0, 0), node 11 is (2, 3): one step back along each axis.
    names = [name for name, _ in node.route(0, 11 * 8, 1.0) if name[0] == "cable"]
    assert names == [("cable", 0, 2), ("cable", 2, 11)]
    assert node.latency(0, 11 * 8) == pytest.approx(2e-6)
    assert node.latency(0, 5) == 0.0
    far = [name for name, _ in node.route(0, 7 * 8, 1.0) if name[0] == "cable"]
    assert [hop[2] for hop in far] == [1, 4, 7]  # (1, 2) is a step and two steps away


def test_what_a_cluster_cannot_run_is_refused() -> None:
    two = cluster(2, topology="switch")
    operation = AllGatherMatmul.of(64, 16, 64, 8, "bfloat16")
    with pytest.raises(Unsupported, match="has 8 ranks; c has 16 devices"):
        run_plan(operation.lower(SERIAL), two)
    wide = AllGatherMatmul.of(64, 16, 64, 16, "bfloat16")
    with pytest.raises(Unsupported, match="direct reads the memory of peers"):
        run_plan(wide.lower(Schedule.parse("adaptive@direct")), two)
    with pytest.raises(Unsupported, match="up to 64 of them, not 128"):
        explore_plans(two.with_nodes(16), "all_gather_matmul", Shape(64, 64, 64))


def test_schedules_are_compared_with_serial() -> None:
    shape = Shape(8192, 8192, 2048)
    found = explore_plans(
        cluster(2, topology="switch"),
        "all_gather_matmul",
        shape,
        [SERIAL, Schedule.parse("adaptive@dma"), Schedule.parse("adaptive@direct")],
    )
    assert [schedule.name for schedule, _ in found.outcomes] == ["serial@dma", "adaptive@dma"]
    assert [str(schedule) for schedule, _ in found.refused] == ["adaptive@direct"]
    assert found.communication < found.serial <= found.communication + 1.1 * found.compute
    assert found.to_json()["schedules"][0]["speedup"] == pytest.approx(1.0, abs=0.02)
