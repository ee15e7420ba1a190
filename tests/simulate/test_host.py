"""Plans on a host: times worked out by hand from what cores and links must do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from weft.machine import HostCores, Machine, load
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.schedule import Schedule
from weft.simulate import run
from weft.timeline import COMPUTE

FILE = Path(__file__).parents[1] / "machine" / "two_threads.toml"

LINK, COPY = 1e6, 1e9  # bytes per second
RATE = 1e9  # flops per second at any size
CALL, TASK, WAKE = 1e-3, 1e-4, 2e-4
SLICE, GRACE = 4e-3, 3e-3


def host(link: float = LINK, cores: int = 2, nap: float = 0.0, slice_: float = 0.0) -> Machine:
    """A host with round numbers: no curve in its GEMM rate, no cost that a test does not name."""
    base = load(FILE)
    assert base.compute.saturation is not None
    return replace(
        base,
        compute=replace(
            base.compute,
            units=1,
            rate={"float32": RATE},
            saturation=replace(base.compute.saturation, m=0.0, n=0.0, k=0.0),
            measured=(),
        ),
        memory=replace(base.memory, bandwidth=COPY, unit_bandwidth=COPY),
        links=replace(
            base.links,
            world=8,
            bandwidth=link,
            peak_bandwidth=link,
            total_bandwidth=8 * link,
            latency=0.0,
        ),
        engines=replace(
            base.engines,
            bandwidth=COPY,
            local_bandwidth=COPY,
            next_packet=0.0,
            row=0.0,
            packet=0.0,
            release=WAKE,
            completion=WAKE,
        ),
        launch=replace(base.launch, host=CALL, kernel=TASK, signal=0.0, poll=0.0, decision=0.0),
        host=HostCores(cores, 0.0, 2e-3, 16384, nap, slice_, GRACE),
    )


def operation(world: int = 2, m: int = 200) -> AllGatherMatmul:
    return AllGatherMatmul.of(m, 50, 100, world)


SHARD = 100 * 100 * 4  # bytes of x on one of two ranks
WHOLE = 2.0 * 200 * 50 * 100 / RATE  # seconds of the whole GEMM


def seconds(name: str, machine: Machine, op: AllGatherMatmul | None = None) -> float:
    return run((op or operation()).lower(Schedule.parse(name)), machine).seconds


def test_serial_is_the_call_the_link_and_the_gemm() -> None:
    expected = CALL + WAKE + SHARD / LINK + WAKE + TASK + WHOLE
    assert seconds("serial@dma", host()) == pytest.approx(expected)


def test_at_memory_speed_a_copy_is_core_time() -> None:
    """Both lanes copy a shard each, on one core: one after the other or at half the rate."""
    expected = CALL + WAKE + 2 * SHARD / COPY + WAKE + TASK + WHOLE
    assert seconds("serial@dma", host(link=COPY)) == pytest.approx(expected)


def test_a_dma_copy_takes_of_the_core_what_moving_its_bytes_takes() -> None:
    slow = host(link=SHARD / (2 * WHOLE))  # still under way when the local shard is done
    simulation = run(operation().lower(Schedule.parse("shard-p2p@dma")), slow)
    local = simulation.compute_pieces(0)[0]
    assert local.end - local.body == pytest.approx(WHOLE / 2 + SHARD / COPY)


def test_naps_take_their_share_too() -> None:
    slow = host(link=SHARD / (2 * WHOLE), nap=5e-5)
    turns = -(-SHARD // int(max(slow.links.bandwidth * 2e-3, 16384) // 400 * 400))
    simulation = run(operation().lower(Schedule.parse("shard-p2p@dma")), slow)
    local = simulation.compute_pieces(0)[0]
    assert local.end - local.body == pytest.approx(WHOLE / 2 + SHARD / COPY + turns * 5e-5)


def test_a_core_driven_copy_takes_half_of_the_core() -> None:
    slow = host(link=SHARD / (2 * WHOLE))
    simulation = run(operation().lower(Schedule.parse("shard-p2p@cores")), slow)
    local = simulation.compute_pieces(0)[0]
    before = WAKE - TASK  # the GEMM starts before the engine is awake
    assert local.end - local.body == pytest.approx(before + 2 * (WHOLE / 2 - before))


def test_beside_three_threads_it_takes_a_quarter_of_their_cores() -> None:
    """Three threads and a copy on the three cores of a rank: each has three quarters of a core."""
    slow = host(link=SHARD / (2 * WHOLE), cores=6)
    assert slow.host is not None
    slow = replace(slow, host=replace(slow.host, threads=3))
    simulation = run(operation().lower(Schedule.parse("shard-p2p@cores")), slow)
    local = simulation.compute_pieces(0)[0]
    before = WAKE - TASK
    assert local.end - local.body == pytest.approx(before + 4 / 3 * (WHOLE / 2 - before))


def test_with_a_core_to_spare_it_takes_none() -> None:
    slow = host(link=SHARD / (2 * WHOLE), cores=4)
    simulation = run(operation().lower(Schedule.parse("shard-p2p@cores")), slow)
    local = simulation.compute_pieces(0)[0]
    assert local.end - local.body == pytest.approx(WHOLE / 2)


@pytest.mark.parametrize("link", [SHARD / (2 * WHOLE), SHARD / (0.1 * WHOLE)])
def test_in_place_a_matmul_takes_as_long_as_the_slower_of_gemm_and_link(link: float) -> None:
    expected = CALL + 2 * TASK + WHOLE / 2 + max(WHOLE / 2, SHARD / link)
    assert seconds("shard-p2p@direct", host(link=link)) == pytest.approx(expected)


def test_ranks_beyond_the_cores_share_them() -> None:
    op = operation(4, 400)
    alone = 2.0 * 400 * 50 * 100 / RATE
    expected = CALL + TASK + WAKE + 100 * 100 * 4 / LINK + WAKE
    assert seconds("serial@dma", host(cores=4), op) == pytest.approx(expected + alone, rel=0.01)
    assert seconds("serial@dma", host(cores=2), op) == pytest.approx(expected + 2 * alone, rel=0.01)


def test_a_switch_gives_every_rank_one_port() -> None:
    op = operation(4, 400)
    mesh = host(cores=4)
    switch = replace(mesh, links=replace(mesh.links, topology="switch", total_bandwidth=LINK))
    more = seconds("serial@dma", switch, op) - seconds("serial@dma", mesh, op)
    assert more == pytest.approx(2 * 100 * 100 * 4 / LINK, rel=0.01)


@pytest.mark.parametrize(("milliseconds", "apart"), [(3.0, 3.0), (4.5, 8.0), (5.5, 5.5)])
def test_a_spinning_engine_learns_of_its_link_when_it_has_the_core(
    milliseconds: float, apart: float
) -> None:
    """Beside a long GEMM it has the core for 4 of 8 ms. A link that is through in the first 4 is
    seen at once; one that is through at 4.5 is seen at 8, too late for the next copy to count from
    4.5; one at 5.5 is seen within the grace, and the next copy does."""
    machine = host(link=SHARD / 2 / (milliseconds * 1e-3), slice_=SLICE)
    machine = replace(machine, compute=replace(machine.compute, rate={"float32": RATE / 100}))
    plan = operation().lower(Schedule.parse("hetero-unfused-1d:2@cores"))
    pieces = [p for p in run(plan, machine).pieces if p.task.kind == "copy" and p.task.rank == 0]
    assert pieces[1].body - pieces[0].body == pytest.approx(apart * 1e-3)


def test_a_waiter_that_slept_gets_the_core_from_an_engine_that_spins_on() -> None:
    plan = operation().lower(Schedule.parse("hetero-unfused-1d:2@cores"))
    slow = SHARD / (20 * WHOLE)

    def first_wait(machine: Machine) -> float:
        simulation = run(plan, machine)
        copy = next(p for p in simulation.pieces if p.task.kind == "copy" and p.task.rank == 0)
        return simulation.compute_pieces(0)[1].start - copy.end

    assert first_wait(host(slow)) == pytest.approx(WAKE)
    assert first_wait(host(slow, slice_=SLICE)) == pytest.approx(WAKE + SLICE / 2)


def test_every_schedule_runs_every_matmul_once() -> None:
    for world in (1, 2, 3, 4):
        op = AllGatherMatmul.of(37, 11, 23, world)
        for schedule in Schedule.space(op):
            plan = op.lower(schedule)
            timeline = run(plan, host()).timeline()
            assert {s.rank for s in timeline.spans} == set(range(world))
            for rank in range(world):
                flops = sum(
                    s.num_flops for s in timeline.spans if s.rank == rank and s.lane == COMPUTE
                )
                assert flops == op.num_flops(rank), schedule
