"""The event simulator against times that can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from weft.errors import Unsupported
from weft.machine import Machine, Saturation, load
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.plan.builder import Builder
from weft.plan.tasks import Plan, Region
from weft.schedule import Schedule
from weft.simulate import run, simulate
from weft.simulate.cost import gemm
from weft.timeline import Timeline

SECOND = 1e9
"""Bytes that one link of the machine below carries in a second."""


def machine(topology: str = "mesh", world: int = 4, **changes: Any) -> Machine:
    """Round numbers: a link carries 1 GB/s, a memory 10 GB/s, and nothing else takes time."""
    node = load("mi300x")
    sections: dict[str, dict[str, Any]] = {
        "compute": {
            "units": 100,
            "rate": {"bfloat16": 1e12, "float32": 1e12},
            "tiling": None,
            "saturation": Saturation(0.0, 0.0, 0.0),
        },
        "memory": {
            "capacity": 1e12,
            "peak_bandwidth": 1e10,
            "bandwidth": 1e10,
            "latency": 0.0,
            "unit_bandwidth": 1e10,
            "crowding": 0.0,
        },
        "links": {
            "topology": topology,
            "world": world,
            "bandwidth": SECOND,
            "total_bandwidth": SECOND if topology == "switch" else 3 * SECOND,
            "latency": 0.0,
            "interference": 0.0,
        },
        "engines": {
            **dict.fromkeys(("packet", "next_packet", "row", "release", "completion"), 0.0),
            "count": 16,
            "bandwidth": SECOND,
            "local_bandwidth": SECOND,
            "memory_bytes_per_byte": 1.0,
        },
        "launch": dict.fromkeys(("host", "kernel", "gap", "signal", "poll", "decision"), 0.0),
        "cores": {
            "all_gather_units": 40,
            "all_to_all_units": 40,
            "copy_units": 20,
            "memory_bytes_per_byte": 1.0,
        },
    }
    for path, value in changes.items():
        section, key = path.split("__")
        sections[section][key] = value
    parts = {name: replace(getattr(node, name), **to) for name, to in sections.items()}
    return replace(node, name="round", **parts)


def copies(world: int, pulls: list[tuple[int, int, int]], schedule: str = "serial@dma") -> Plan:
    """A plan of nothing but (rank, source, bytes) copies."""
    operation = AllGatherMatmul.of(world, 1, 1, world, "bfloat16")
    builder = Builder(operation, Schedule.parse(schedule))
    size = max(size for _, _, size in pulls) // 2
    for rank in range(world):
        builder.add_buffer("x", rank, size, 1, "input")
        builder.add_buffer("g", rank, size * len(pulls), 1, "workspace")
    for number, (rank, source, size) in enumerate(pulls):
        there = Region(rank, "g", number * size // 2, size // 2, 0, 1)
        here = Region(source, "x", 0, size // 2, 0, 1)
        builder.copy(rank, here, there, peer=source, label=f"{rank} from {source}")
    return builder.plan()


def ends(timeline: Timeline) -> dict[str, float]:
    return {span.task: pytest.approx(span.end) for span in timeline.spans}


def test_one_copy_alone() -> None:
    node = machine(engines__release=0.25, engines__packet=0.5)
    (span,) = simulate(copies(2, [(0, 1, 2_000_000_000)]), node).spans
    assert (span.start, span.end) == (0.0, pytest.approx(2.75))
    assert (span.rank, span.lane, span.kind) == (0, "engine 1", "copy")
    assert span.num_bytes == 2_000_000_000


def test_copies_of_one_lane_follow_each_other_with_a_packet_between() -> None:
    node = machine(engines__release=0.25, engines__packet=0.5, engines__next_packet=0.125)
    plan = copies(2, [(0, 1, 1_000_000_000), (0, 1, 1_000_000_000)])
    first, second = simulate(plan, node).spans
    assert (first.start, first.end) == (0.0, pytest.approx(1.75))
    assert (second.start, second.end) == (pytest.approx(1.75), pytest.approx(2.875))


def test_two_copies_share_the_port_of_a_switch() -> None:
    # Half a GB/s each until the short one ends at 2 s with 1 GB; 2 GB are left for the long one.
    plan = copies(3, [(0, 1, 1_000_000_000), (2, 1, 3_000_000_000)])
    assert ends(simulate(plan, machine("switch"))) == {"0 from 1": 2.0, "2 from 1": 4.0}


def test_pairs_of_a_mesh_do_not_share() -> None:
    plan = copies(3, [(0, 1, 1_000_000_000), (2, 1, 3_000_000_000)])
    assert ends(simulate(plan, machine("mesh"))) == {"0 from 1": 1.0, "2 from 1": 3.0}


def test_a_mesh_may_have_less_out_of_a_device_than_its_links() -> None:
    node = machine("mesh", links__total_bandwidth=1.5 * SECOND)
    plan = copies(3, [(0, 1, 1_500_000_000), (2, 1, 3_000_000_000)])
    # 0.75 GB/s each for 2 s; then the second has its link, and 1.5 GB to go.
    assert ends(simulate(plan, node)) == {"0 from 1": 2.0, "2 from 1": 3.5}


def test_a_ring_goes_through_its_neighbours() -> None:
    # 0 -> 2 goes over 1 (both ways are as long, upwards it is); 0 -> 1 shares the first hop.
    plan = copies(4, [(2, 0, 1_000_000_000), (1, 0, 1_000_000_000), (3, 0, 1_000_000_000)])
    found = ends(simulate(plan, machine("ring")))
    assert found == {"2 from 0": 2.0, "1 from 0": 2.0, "3 from 0": 1.0}


def test_lanes_share_engines_where_there_are_too_few() -> None:
    plan = copies(4, [(0, source, 1_000_000_000) for source in (1, 2, 3)])
    assert simulate(plan, machine()).seconds == pytest.approx(1.0)
    assert simulate(plan, machine(engines__count=1)).seconds == pytest.approx(3.0)
    assert simulate(plan, machine(engines__count=2)).seconds == pytest.approx(2.0)


def test_short_rows_slow_an_engine() -> None:
    operation = AllGatherMatmul.of(2, 1, 1, 2, "bfloat16")
    builder = Builder(operation, Schedule.parse("serial"))
    for rank in range(2):
        builder.add_buffer("x", rank, 1000, 1000, "input")
    builder.add_buffer("g", 0, 1000, 500, "workspace")
    cut = Region(1, "x", 0, 1000, 0, 500)
    builder.copy(0, cut, Region(0, "g", 0, 1000, 0, 500), peer=1, label="cut")
    node = machine(engines__row=1e-3)
    assert simulate(builder.plan(), node).seconds == pytest.approx(1e-3 + 0.999)


def gemm_and_copy(m: int, n: int, k: int, size: int, schedule: str = "serial@dma") -> Plan:
    """Rank 0 multiplies while it pulls `size` bytes from rank 1."""
    operation = AllGatherMatmul.of(m, n, k, 2, "bfloat16")
    builder = Builder(operation, Schedule.parse(schedule))
    a = builder.add_buffer("a", 0, m, k, "input")
    b = builder.add_buffer("b", 0, k, n, "input")
    c = builder.add_buffer("c", 0, m, n, "output")
    x = builder.add_buffer("x", 1, size // 2, 1, "input")
    g = builder.add_buffer("g", 0, size // 2, 1, "workspace")
    builder.matmul(0, a.all(), b.all(), c.all(), label="gemm")
    builder.copy(0, x.all(), g.all(), peer=1, label="copy")
    return builder.plan()


def test_a_gemm_and_a_copy_share_memory() -> None:
    # 1 x 1 x 9e9: 36 GB of operands and nearly no arithmetic: 3.6 s alone at 10 GB/s. Beside the
    # copy, 11 GB/s are asked for, and both are slowed alike: the copy takes 3.3 s, in which the
    # GEMM moves 30 GB; 6 GB are left, at full speed.
    plan = gemm_and_copy(1, 1, 9_000_000_000, 3_000_000_000)
    assert ends(simulate(plan, machine())) == {"copy": 3.3, "gemm": 3.9}


def test_dma_leaves_a_compute_bound_gemm_alone() -> None:
    plan = gemm_and_copy(10_000, 10_000, 5_000, 500_000_000)
    assert ends(simulate(plan, machine())) == {"copy": 0.5, "gemm": 1.0}


def test_cores_take_compute_units_while_they_copy() -> None:
    # 0.5 s with 80 of 100 units do 0.4 of the work; 0.6 s are left.
    plan = gemm_and_copy(10_000, 10_000, 5_000, 500_000_000, "serial@cores")
    assert ends(simulate(plan, machine())) == {"copy": 0.5, "gemm": 1.1}
    # With interference the copy takes 0.625 s. It fills its link one way only, which is half of
    # what links carry, so the GEMM is slowed by half as much: 0.444 of the work are done meanwhile.
    disturbed = machine(links__interference=0.25)
    assert ends(simulate(plan, disturbed)) == {"copy": 0.625, "gemm": 0.625 + 5 / 9}


def test_cores_hold_their_units_from_the_launch_on() -> None:
    # A second of latency and half a second of bytes, all with 80 of 100 units: 1.2 of the work of
    # 1 s would be done, so the GEMM ends before the copy, 1.25 s after it began.
    plan = gemm_and_copy(10_000, 10_000, 5_000, 500_000_000, "serial@cores")
    assert ends(simulate(plan, machine(links__latency=1.0))) == {"copy": 1.5, "gemm": 1.25}


def test_kernels_and_bytes_slow_each_other_whoever_moves_the_bytes() -> None:
    disturbed = machine(links__interference=0.25)
    by_engines = gemm_and_copy(10_000, 10_000, 5_000, 500_000_000)
    # 0.625 s of copying over a link that is full one way; the GEMM does 5 / 9 of its work.
    assert ends(simulate(by_engines, disturbed)) == {"copy": 0.625, "gemm": 0.625 + 4 / 9}
    operation = AllGatherMatmul.of(20_000, 10_000, 5_000, 2, "bfloat16")
    in_place = operation.lower(Schedule.parse("shard-p2p@direct"))
    spans = {span.task: span for span in simulate(in_place, disturbed).of(0).spans}
    assert spans["local shard"].seconds == pytest.approx(1.0)
    # Its 0.1 GB fill a tenth of the link while it runs: a tenth of the interference.
    assert spans["x1[0:10000]"].seconds == pytest.approx(1.025)


@pytest.mark.parametrize("topology", ["mesh", "switch"])
def test_interference_acts_on_the_port_that_copies_share(topology) -> None:
    """Behind a switch three copies share a port: less for each of them must be less for all."""
    operation = AllGatherMatmul.of(40, 1, 1, 4, "bfloat16")
    builder = Builder(operation, Schedule.parse("serial@dma"))
    a = builder.add_buffer("a", 0, 10_000, 50_000, "input")
    b = builder.add_buffer("b", 0, 50_000, 10_000, "input")
    c = builder.add_buffer("c", 0, 10_000, 10_000, "output")
    builder.matmul(0, a.all(), b.all(), c.all(), label="gemm")
    for source in (1, 2, 3):
        x = builder.add_buffer("x", source, 200_000_000, 1, "input")
        g = builder.add_buffer(f"g{source}", 0, 200_000_000, 1, "workspace")
        builder.copy(0, x.all(), g.all(), peer=source, label=f"copy {source}")
    plan = builder.plan()
    calm = ends(simulate(plan, machine(topology)))["copy 1"].expected
    slowed = ends(simulate(plan, machine(topology, links__interference=0.5)))["copy 1"]
    assert slowed == 1.5 * calm


def test_the_host_launches_kernel_after_kernel_but_a_graph_at_once() -> None:
    operation = AllGatherMatmul.of(40_000, 100, 5_000, 4, "bfloat16")
    plan = operation.lower(Schedule.parse("hetero-unfused-1d@dma"))
    kernels = sum(task.rank == 0 and task.kind == "matmul" for task in plan.tasks)
    eager = machine(launch__host=1.0, launch__gap=0.25, launch__captured_gap=0.125)
    graph = eager.captured()
    assert (graph.launch.host, graph.launch.gap) == (0.0, 0.125)
    assert simulate(plan, eager).seconds == pytest.approx(kernels - 1, abs=0.1)
    assert simulate(plan, graph).seconds < 0.125 * kernels + 0.2


def test_cores_take_no_more_units_than_saturate_the_links() -> None:
    operation = AllGatherMatmul.of(40, 1, 1, 4, "bfloat16")
    builder = Builder(operation, Schedule.parse("serial@cores"))
    a = builder.add_buffer("a", 0, 10_000, 5_000, "input")
    b = builder.add_buffer("b", 0, 5_000, 10_000, "input")
    c = builder.add_buffer("c", 0, 10_000, 10_000, "output")
    builder.matmul(0, a.all(), b.all(), c.all(), label="gemm")
    for source in (1, 2, 3):
        x = builder.add_buffer("x", source, 300_000_000, 1, "input")
        g = builder.add_buffer(f"g{source}", 0, 300_000_000, 1, "workspace")
        builder.copy(0, x.all(), g.all(), peer=source, label=f"copy {source}")
    # Three copies of 20 units each hold 40 at most: 0.6 s at 60 %, then 0.64 s alone.
    assert ends(simulate(builder.plan(), machine()))["gemm"] == 1.24


def test_direct_reads_over_the_link_while_it_computes() -> None:
    operation = AllGatherMatmul.of(20_000, 10_000, 5_000, 2, "bfloat16")
    plan = operation.lower(Schedule.parse("shard-p2p@direct"))
    spans = {span.task: span for span in simulate(plan, machine()).of(0).spans}
    local, remote = spans["local shard"], spans["x1[0:10000]"]
    assert local.seconds == pytest.approx(1.0)  # 1e12 flops
    assert remote.seconds == pytest.approx(1.0)  # 0.1 GB over the link is hidden
    slow = machine(links__bandwidth=SECOND / 40, links__total_bandwidth=SECOND)
    spans = {span.task: span for span in simulate(plan, slow).of(0).spans}
    assert spans["x1[0:10000]"].seconds == pytest.approx(4.0)


def test_direct_reads_from_the_memory_of_the_peer() -> None:
    # Vectors: 1 GB of A and 1 GB of B. The remote shard of A comes at 10 GB/s out of a memory from
    # which the peer reads its own 1 GB of B and gives as much of A.
    operation = AllGatherMatmul.of(2, 1, 500_000_000, 2, "bfloat16")
    plan = operation.lower(Schedule.parse("shard-p2p@direct"))
    fast = machine(links__bandwidth=1e11, links__total_bandwidth=1e11)
    spans = {span.task: span for span in simulate(plan, fast).of(0).spans}
    assert spans["local shard"].seconds == pytest.approx(0.2)
    assert spans["x1[0:1]"].seconds == pytest.approx(0.2)


def test_a_waiter_learns_of_an_end_later() -> None:
    operation = AllGatherMatmul.of(20_000, 10_000, 5_000, 2, "bfloat16")
    plan = operation.lower(Schedule.parse("serial@dma"))
    node = machine(engines__completion=0.25, launch__kernel=0.5, launch__gap=0.125)
    timeline = simulate(plan, node).of(1)
    matmul = next(span for span in timeline.spans if span.kind == "matmul")
    assert matmul.start == pytest.approx(0.1 + 0.25)
    assert matmul.end == pytest.approx(0.35 + 0.5 + 2.0)  # no gap before a lane's first kernel
    assert matmul.num_flops == 2 * 20_000 * 10_000 * 5_000


def test_kernels_of_a_lane_keep_their_order_and_a_gap() -> None:
    operation = AllGatherMatmul.of(20_000, 10_000, 5_000, 2, "bfloat16")
    plan = operation.lower(Schedule.parse("hetero-unfused-1d:2@dma"))
    timeline = simulate(plan, machine(launch__gap=0.125))
    spans = [s for s in timeline.of(0).spans if s.lane == "compute"]
    assert [s.task for s in spans] == ["local shard", "x1[0:5000]", "x1[5000:10000]"]
    assert [s.end for s in spans] == [pytest.approx(x) for x in (1.0, 1.625, 2.25)]


def test_sums_over_columns_cost_memory() -> None:
    # 1e6 elements of C and next to nothing of A and B: all bound by memory at 10 GB/s.
    operation = AllGatherMatmul.of(1_000, 1_000, 2, 2, "bfloat16")
    (whole,) = run(operation.lower(Schedule.parse("serial")), machine()).compute_pieces(0)
    cut = run(operation.lower(Schedule.parse("uniform-fused-2d:2")), machine())
    first, second, rounding = cut.compute_pieces(0)
    assert whole.local == pytest.approx((2e6 + 2 * 4_000) / 1e10)
    assert first.local == pytest.approx((4e6 + 4_000) / 1e10)  # a sum in float32
    assert second.local == pytest.approx((8e6 + 4_000) / 1e10)  # read as well
    assert rounding.local == pytest.approx(6e6 / 1e10)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"memory__capacity": 1e3}, "needs 0.0 GB on each rank"),
        ({"links__world": 2}, "needs 4 devices; round has 2"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, float], words: str) -> None:
    plan = AllGatherMatmul.of(64, 64, 64, 4, "bfloat16").lower(Schedule.parse("serial"))
    with pytest.raises(Unsupported, match=words) as caught:
        simulate(plan, machine(**changes))
    assert "\n" not in str(caught.value)


def test_nothing_to_multiply_takes_no_time() -> None:
    plan = AllGatherMatmul.of(8, 8, 0, 2, "bfloat16").lower(Schedule.parse("serial"))
    assert simulate(plan, machine()).seconds < 1e-6


def test_a_piece_meets_the_clock_of_the_whole_load() -> None:
    node = load("h100")
    assert node.compute.sustained_share < 1.0
    operation = AllGatherMatmul.of(65536, 8192, 8192, 8, "bfloat16")
    whole = run(operation.compute_only().lower(Schedule.parse("serial")), node)
    assert whole.seconds == pytest.approx(gemm(node, 65536, 8192, 8192, "bfloat16").seconds)
    pieces = run(operation.lower(Schedule.parse("shard-p2p@dma")), node).compute_pieces(0)
    alone = gemm(node, 8192, 8192, 8192, "bfloat16")
    assert pieces[0].local > alone.compute_seconds * 1.01
    assert sum(p.local for p in pieces) >= whole.compute_pieces(0)[0].local


def test_the_same_plan_gives_the_same_timeline() -> None:
    operation = AllGatherMatmul.of(1003, 257, 130, 4, "bfloat16")
    for schedule in Schedule.space(operation):
        plan = operation.lower(schedule)
        assert simulate(plan, machine()) == simulate(replace(plan), machine())
