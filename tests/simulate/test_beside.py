"""Independent work on simulated devices: who has which units, and who slows whom."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.machine import Machine, load, names
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.plan.concurrent import COLLECTIVES, Concurrent
from weft.plan.tasks import Copy, Matmul
from weft.schedule import Schedule
from weft.simulate import Simulation, run
from weft.simulate.cost import collective, gemm
from weft.simulate.sharing import Flow, Resource, Sharing
from weft.strategy import Strategy

MI300X = load("mi300x")
CALM = replace(MI300X, links=replace(MI300X.links, interference=0.0))
LONG = Concurrent.of((4096, 8192, 28672), "all_gather", 448 << 20, 8, "bfloat16")
STREAMING = Concurrent.of((64, 106496, 16384), "all_gather", 128 << 20, 8, "bfloat16")


def simulated(operation: Concurrent, name: str, machine: Machine = CALM) -> Simulation:
    return run(operation.lower(Strategy.parse(name)), machine)


def matmul(found: Simulation) -> float:
    return max(p.seconds for p in found.pieces if isinstance(p.task, Matmul))


def copied(found: Simulation) -> tuple[float, float]:
    """When the first copy of rank 0 started and the last one ended."""
    copies = [p for p in found.pieces if isinstance(p.task, Copy) and p.task.rank == 0]
    return min(p.start for p in copies), max(p.end for p in copies)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_alone_both_are_what_their_costs_say(name, kind) -> None:
    machine = load(name)
    for size in (1 << 14, 1 << 20, 1 << 25, 1 << 30):
        operation = Concurrent.of((0, 0, 0), kind, size, 8, "bfloat16")
        for strategy in ("concurrent", "dma"):
            driver = "dma" if strategy == "dma" else "cores"
            variant = "pcpy" if strategy == "dma" else None
            wanted = collective(machine, kind, size, 8, driver=driver, variant=variant)
            assert simulated(operation, strategy, machine).seconds == pytest.approx(wanted, 1e-3)
    only = Concurrent.of((4096, 8192, 8192), kind, 0, 8, "bfloat16")
    cost = gemm(machine, 4096, 8192, 8192, "bfloat16")
    assert simulated(only, "dma", machine).seconds == pytest.approx(cost.seconds, 1e-3)


def test_serial_is_the_sum() -> None:
    alone = simulated(LONG.compute_only(), "dma").seconds
    moving = simulated(LONG.communication_only(), "concurrent").seconds
    assert simulated(LONG, "serial").seconds == pytest.approx(alone + moving, 0.01)


def test_behind_the_gemm_a_collective_starves_until_the_last_wave() -> None:
    alone = simulated(LONG.compute_only(), "dma").seconds
    moving = simulated(LONG.communication_only(), "concurrent").seconds
    found = simulated(LONG, "concurrent")
    start, end = copied(found)
    assert 0.7 * alone < start < alone  # one of a few waves is left
    assert end == pytest.approx(start + moving, rel=0.05)
    assert matmul(found) == pytest.approx(alone, rel=0.01)  # nothing is taken from it


def test_units_become_free_as_the_last_tiles_end() -> None:
    """Ends are spread over a tile's time, so even a full last wave lets the collective begin."""
    units = MI300X.compute.units
    tile = (256, 256)
    full = Concurrent.of(
        (tile[0] * 16, tile[1] * units * 2 // 16, 8192), "all_gather", 1 << 28, 8, "bfloat16"
    )
    tiles = (full.m // tile[0]) * (full.n // tile[1])
    assert gemm(CALM, full.m, full.n, full.k, "bfloat16").tile == tile
    assert tiles % units == 0
    found = simulated(full, "concurrent")
    # The second of two waves leaves units from its begin on; it has its 32 halfway.
    share = (1.0 + 0.5 * 32 / units) / 2.0
    assert copied(found)[0] == pytest.approx(share * matmul(found), rel=0.01)


def test_ahead_of_the_gemm_a_collective_takes_its_units() -> None:
    for kind, units in (("all_gather", 32), ("all_to_all", 64)):
        operation = replace(
            Concurrent.of((4096, 8192, 28672), kind, 1 << 33, 8, "bfloat16"), dtype="bfloat16"
        )
        found = simulated(operation, "prioritized")
        left = gemm(CALM, 4096, 8192, 28672, "bfloat16", units=304 - units).seconds
        assert matmul(found) == pytest.approx(left, rel=0.01)
        assert found.seconds == pytest.approx(
            simulated(operation.communication_only(), "concurrent").seconds, rel=0.01
        )


def test_masks_hold_from_launch_to_end() -> None:
    short = Concurrent.of((4096, 8192, 28672), "all_gather", 1 << 27, 8, "bfloat16")
    confined = gemm(CALM, 4096, 8192, 28672, "bfloat16", units=304 - 64).seconds
    assert matmul(simulated(short, "partitioned:64")) == pytest.approx(confined, rel=0.01)
    # Ahead and confined, the collective gives its units back when it is over.
    assert matmul(simulated(short, "prioritized+partitioned:64")) < 0.9 * confined


def test_too_few_units_leave_links_hungry() -> None:
    moving = simulated(LONG.communication_only(), "concurrent").seconds
    hungry = copied(simulated(LONG, "partitioned:8"))[1]
    assert hungry == pytest.approx(4 * moving, rel=0.05)


def test_engines_take_no_units_and_trimming_helps_only_what_streams() -> None:
    alone = simulated(LONG.compute_only(), "dma").seconds
    assert matmul(simulated(LONG, "dma")) == pytest.approx(alone, rel=0.01)
    assert simulated(LONG, "dma+trimmed:32").seconds > 1.05 * simulated(LONG, "dma").seconds
    assert simulated(STREAMING, "dma+trimmed:8").seconds < simulated(STREAMING, "dma").seconds


def test_memory_that_cannot_serve_both_slows_both() -> None:
    gemm_alone = simulated(STREAMING.compute_only(), "dma").seconds
    moving = simulated(STREAMING.communication_only(), "dma").seconds
    found = simulated(STREAMING, "dma")
    assert matmul(found) > 1.05 * gemm_alone
    assert copied(found)[1] > 1.05 * moving


def test_interference_slows_both_and_more_where_bytes_make_more_traffic() -> None:
    disturbed = replace(MI300X, links=replace(MI300X.links, interference=0.2))
    even = Concurrent.of((4096, 8192, 28672), "all_gather", 1 << 32, 8, "bfloat16")
    alone = simulated(even.compute_only(), "dma").seconds
    found = simulated(even, "dma", disturbed)
    assert matmul(found) == pytest.approx(1.2 * alone, rel=0.01)
    assert copied(found)[1] > copied(simulated(even, "dma"))[1] + 0.15 * alone
    cores = matmul(simulated(even, "prioritized", disturbed))
    slower = 1.0 + 0.2 * MI300X.cores.memory_bytes_per_byte
    assert cores == pytest.approx(slower * matmul(simulated(even, "prioritized")), rel=0.01)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("strategy", ["prioritized", "dma"])
def test_interference_slows_a_collective_on_every_machine(name, strategy) -> None:
    """Behind a switch too, where copies share a port."""
    machine = load(name)
    assert machine.links.interference > 0.0
    even = Concurrent.of((8192, 8192, 65536), "all_gather", 1 << 29, 8, "bfloat16")
    calm = copied(simulated(even, strategy, machine.without_contention()))[1]
    assert (
        copied(simulated(even, strategy, machine))[1]
        > (1.0 + 0.8 * machine.links.interference) * calm
    )


def test_the_same_copy_beside_the_same_gemm_costs_the_same_whatever_the_plan() -> None:
    """A schedule whose GEMM and gather overlap, and C3 of the same GEMM and gather."""
    rows, columns, inner, world = 8192, 28672, 8192, 8
    operation = AllGatherMatmul.of(rows * world, columns, inner, world, "bfloat16")
    dependent = run(operation.lower(Schedule.parse("shard-p2p@dma")), MI300X)
    local = next(p for p in dependent.pieces if isinstance(p.task, Matmul))
    moved = next(p for p in dependent.pieces if isinstance(p.task, Copy))
    gathered = Concurrent.of(
        (rows, columns, inner), "all_gather", rows * inner * 2 * 2, 2, "bfloat16"
    )
    beside = run(gathered.lower(Strategy.parse("dma")), MI300X)
    other = next(p for p in beside.pieces if isinstance(p.task, Copy))
    assert moved.end < local.end  # all of its bytes move beside the GEMM
    assert moved.end - moved.body == pytest.approx(other.end - other.body, rel=0.01)


def test_one_rank_stands_for_all() -> None:
    for name in ("concurrent", "prioritized", "partitioned:16", "dma", "dma+trimmed:8"):
        plan = STREAMING.lower(Strategy.parse(name))
        folded, every = run(plan, MI300X), run(plan, MI300X, fold=False)
        assert folded.folded
        assert folded.seconds == pytest.approx(every.seconds, rel=1e-6)


def test_uneven_and_empty_work_ends() -> None:
    for rows in ((5, 0, 3), (0, 0, 0), (1, 1, 1)):
        for name in ("concurrent", "prioritized", "partitioned:8", "dma"):
            operation = Concurrent(13, 7, 11, "all_gather", rows, 3, "bfloat16")
            assert simulated(operation, name).seconds > 0.0


def test_flows_on_a_queued_resource_are_slowed_alike() -> None:
    memory = Resource(("memory", 0, 0), 10.0, queued=True)
    other = Resource(("other", 0, 0), 1.0)
    sharing = Sharing()
    large, small = (Flow(None, 1.0, cap, ((memory, 1.0),), 0.0) for cap in (18.0, 2.0))
    bound = Flow(None, 1.0, 4.0, ((other, 1.0), (memory, 1.0)), 0.0)
    for flow in (large, small):
        sharing.start(flow)
    sharing.settle(0.0)
    assert (large.rate, small.rate) == (pytest.approx(9.0), pytest.approx(1.0))
    sharing.start(bound)  # held by the other resource, it leaves more of this one to the rest
    sharing.settle(0.0)
    assert bound.rate == pytest.approx(10.0 / 21.0)
    assert (large.rate, small.rate) == (pytest.approx(180 / 21.0), pytest.approx(20 / 21.0))
    sharing.stop(large)
    sharing.settle(0.0)
    assert small.rate == pytest.approx(2.0)
