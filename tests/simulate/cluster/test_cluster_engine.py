"""The engine under clusters: lanes, waiting, memory that kernels and cards share, units held."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.errors import InvalidPlan
from weft.machine import load_cluster
from weft.simulate.cluster import ClusterKernel, ClusterTask, Wiring, lower, run

DISTURBED = load_cluster("mi300x").with_nodes(4)
CLUSTER = replace(DISTURBED, machine=DISTURBED.device.without_contention())
WIRING = Wiring(CLUSTER)
UNITS = CLUSTER.device.compute.units


def compute(seconds: float, after: tuple[int, ...] = (), traffic: float = 0.0) -> ClusterTask:
    kernel = ClusterKernel(0.0, lambda units: seconds * UNITS / units, traffic)
    return ClusterTask("kernel", "compute", "matmul", after, kernel)


def test_lanes_are_queues_and_waits_are_kept() -> None:
    ran = run(WIRING, [compute(1.0), compute(2.0), compute(4.0, (1,))])
    assert [span.start for span in ran.spans] == pytest.approx([0, 1, 3])
    assert [span.end for span in ran.spans] == pytest.approx([1, 3, 7])


def test_a_kernel_that_waits_lets_the_next_pass() -> None:
    copy = lower(WIRING, "all_to_all", 1e9, "direct", start=0.0)
    ran = run(WIRING, [*copy, compute(1.0, (0,)), compute(0.001)])
    kernels = [span for span in ran.spans if span.lane == "compute"]
    assert kernels[0].seconds == pytest.approx(0.001)
    assert kernels[1].start >= ran.end_of("all_to_all") - 1e-9


def test_communication_holds_units_only_while_it_runs() -> None:
    alone = run(WIRING, lower(WIRING, "all_to_all", 1e9, "direct", start=0.0)).seconds
    held = lower(WIRING, "all_to_all", 1e9, "direct", start=0.0, units=UNITS // 2)
    ran = run(WIRING, [*held, compute(2 * alone)])
    # Half the units for as long as it takes, then all of them: half of `alone` is lost.
    assert ran.seconds == pytest.approx(2.5 * alone, rel=1e-6)
    free = lower(WIRING, "all_to_all", 1e9, "direct", start=0.0)
    assert run(WIRING, [*free, compute(2 * alone)]).seconds == pytest.approx(2 * alone)


def test_memory_is_shared_with_what_is_sent() -> None:
    bandwidth = CLUSTER.device.memory.bandwidth
    seconds = 0.05
    copy = lower(WIRING, "all_to_all", 4e9, "direct", start=0.0)
    kernel = compute(seconds, traffic=seconds * bandwidth)
    both = run(WIRING, [*copy, kernel])
    # Every byte is read here and written at a peer, whose bytes are written here.
    taken = 2 * 4.85e10 / bandwidth
    assert both.end_of("kernel") == pytest.approx(seconds / (1 - taken), rel=0.02)
    assert both.end_of("all_to_all") == pytest.approx(run(WIRING, copy).seconds, rel=1e-6)


def test_kernels_and_bytes_slow_each_other() -> None:
    """Inside a node both, by what the machine says; over the network only the kernel, by as much as
    a card fills of what links carry."""
    wiring, machine = Wiring(DISTURBED), DISTURBED.device
    inside = lower(WIRING, "all_gather", 1e9, "direct", axes=(0,), start=0.0)
    alone = run(wiring, inside).seconds
    beside = run(wiring, [*inside, compute(10 * alone)])
    slower = 1.0 + machine.links.interference
    assert beside.end_of("all_gather") == pytest.approx(slower * alone, rel=1e-3)
    assert beside.end_of("kernel") == pytest.approx((9 + slower) * alone, rel=1e-3)
    across = lower(WIRING, "all_gather", 1e9, "direct", axes=(1,), start=0.0)
    alone = run(wiring, across).seconds
    beside = run(wiring, [*across, compute(10 * alone)])
    filled = DISTURBED.nic_bandwidth / machine.links.out_of_device(8)
    lost = alone - alone / (1.0 + machine.links.interference * filled)
    assert beside.end_of("all_gather") == pytest.approx(alone, rel=1e-3)
    assert beside.end_of("kernel") == pytest.approx(10 * alone + lost, rel=1e-3)


def test_a_circle_is_a_bug_and_said() -> None:
    with pytest.raises(InvalidPlan):
        run(WIRING, [compute(1.0, (1,)), compute(1.0, (0,))])


def test_the_last_task_of_a_collective_ends_last() -> None:
    for algorithm, chunks in (
        ("direct", 1),
        ("hierarchical", 1),
        ("hierarchical", 7),
        ("mixed", 5),
    ):
        tasks = lower(WIRING, "all_gather", 1e8, algorithm, chunks=chunks)
        ran = run(WIRING, [*tasks, compute(1.0, (len(tasks) - 1,))])
        before = max(span.end for span in ran.spans if span.lane != "compute")
        assert ran.spans[-1].start == pytest.approx(before)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_every_algorithm_sends_at_least_what_it_must(kind: str) -> None:
    world, size = CLUSTER.world, 1e8
    least = (2 if kind == "all_reduce" else 1) * size * (world - 1) / world
    for algorithm in ("direct", "ring", "hierarchical", "halving-doubling"):
        if kind == "all_to_all" and algorithm not in ("direct", "hierarchical"):
            continue
        tasks = lower(WIRING, kind, size, algorithm, chunks=3)
        sent = sum(task.num_bytes for task in tasks)
        if kind == "all_to_all" and algorithm == "hierarchical":
            assert sent > least  # bytes for other nodes go through the node, too
        else:
            assert sent == pytest.approx(least, rel=1e-6)
