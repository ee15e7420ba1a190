"""A serial call is one GEMM and one collective of the channel: without staging, beside collectives
of other threads, recorded, and replaced by another plan when the ranks expect different ones."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import integers, product

import weft
from weft.fabric import of
from weft.fabric.host.collective_program import collective_of
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.plan.all_to_all_matmul import AllToAllMatmul
from weft.run import session as sessions
from weft.schedule import Schedule
from weft.select import auto
from weft.select.guard import CALLS, TURNS
from weft.select.heuristic import Choice

sys.path.insert(0, str(Path(__file__).parent.parent / "ops"))
from conformance import Case, same
from operators import OPERATORS

MATMULS = [name for name in OPERATORS if "matmul" in name]
SUMS = ("matmul_reduce_scatter", "matmul_all_reduce")
GATHERS = ("all_gather_matmul", "all_to_all_matmul")


def _force(name: str | None) -> None:
    """Rank 0 chooses a schedule by name from now on, for all ranks."""
    memory = auto.of(sessions.of(of(None)))
    if dist.get_rank() == 0:
        memory.forced = None if name is None else Choice(Schedule.parse(name), "for a test")
        memory.observer = lambda operation, seconds: None


# -- which plans -----------------------------------------------------------------------------------


class Outside:
    """An operation that the fabric does not know, with all that another one says."""

    def __init__(self, known: AllGatherMatmul) -> None:
        self.known = known

    def __getattr__(self, name: str) -> object:
        return getattr(self.known, name)


def test_any_operation_can_have_a_collective():
    plan = AllGatherMatmul((3, 0), ((4, 1), (5, 2)), 7).lower(Schedule.parse("serial"))
    found = collective_of(replace(plan, operation=Outside(plan.operation)), 1)
    assert found is not None
    assert (found.kind.name, found.given, found.taken) == ("all_gather", (0,), (3, 0))
    assert (found.rows, found.columns, found.weights) == (3, 7, 2)


def test_what_is_no_single_collective():
    op = AllToAllMatmul.of(8, 4, 2, 2)
    cases = [
        (op, "serial", True),
        (op, "shard-p2p", False),
        (replace(op, result="float64"), "serial", False),
        (AllToAllMatmul(((1, 2, 3, 4),) * 2, ((4,),) * 2, 2, experts=2), "serial", False),
    ]
    for operation, schedule, is_one in cases:
        plan = operation.lower(Schedule.parse(schedule))
        assert (collective_of(plan, 0) is not None) == is_one, (operation, schedule)


# -- no staging ------------------------------------------------------------------------------------


def inputs_stay_where_they_are() -> None:
    memory, staged = of(None).memory, []
    share = memory.share
    memory.share = lambda tensor, turn: staged.append(tensor) or share(tensor, turn)
    x, w = torch.ones(20, 600), torch.ones(600, 3)
    try:
        for number in range(6):
            if number == 2:  # until then the ranks may not have known what to expect
                staged.clear()
            y = weft.all_gather_matmul(x, w, schedule="serial")
            assert (y == 600).all()
    finally:
        del memory.share
    assert not staged


def test_known_calls_stage_nothing(renewed_ranks):
    renewed_ranks(2).run(inputs_stay_where_they_are)


# -- another plan than expected --------------------------------------------------------------------


def plans_change(name: str, schedules: list[str]) -> list[str]:
    """Rank 0 changes its mind: others expect the last plan, and have exposed what that needs."""
    case, ran = Case(name, 3, sizes=(5, 24)), []
    try:
        for schedule in schedules:
            _force(schedule)
            same(case)
            ran.append(weft.explain().schedule)
    finally:
        _force(None)
    return ran


@pytest.mark.parametrize("name", GATHERS + SUMS[:1])
@pytest.mark.parametrize("world", [2, 3])
def test_a_serial_call_becomes_another_and_back(renewed_ranks, world, name):
    other = "adaptive@dma" if name != "all_to_all_matmul" else "hetero-unfused-1d@direct"
    names = [*["serial@dma"] * 3, *[other] * 2, "serial@dma", other, *["serial@cores"] * 2, other]
    assert renewed_ranks(world).run(plans_change, name, names) == [names] * world


def sizes_change() -> None:
    """A rank whose own size is as before expects the old sizes of its peers."""
    rank, world = dist.get_rank(), dist.get_world_size()
    w = integers((7, 5), torch.float32, 1)
    for number in range(12):
        rows = [4 + (s == 1 and number % 3 == 2) * (number % 2 + 1) for s in range(world)]
        parts = [integers((n, 7), torch.float32, s) for s, n in enumerate(rows)]
        y = weft.all_gather_matmul(parts[rank], w, schedule="serial", shard_rows=[-1] * world)
        assert torch.equal(y, product(torch.cat(parts), w)), number


def test_sizes_of_peers_change(ranks):
    for world in (2, 3):
        ranks(world).run(sizes_change)


def refused_between() -> None:
    """A mismatch in the middle of known calls leaves the group as it was."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x, w = torch.ones(4, 600), torch.ones(600, 3)
    for number in range(6):
        assert (weft.all_gather_matmul(x, w, schedule="serial") == 600).all()
        odd = rank == number % world
        call = weft.matmul_reduce_scatter if odd else weft.all_gather_matmul
        with pytest.raises(weft.Mismatch):
            call(x, w, schedule="serial")
        with pytest.raises((weft.Mismatch, weft.Unsupported)):
            weft.all_gather_matmul(x[:, : 500 if odd else 600], w, schedule="serial")


def test_a_mismatch_between_known_calls(ranks):
    for world in (2, 3):
        ranks(world).run(refused_between)


# -- beside other collectives ----------------------------------------------------------------------


def beside_another_thread() -> None:
    """Collectives of another thread come in any order between the calls, on every rank its own."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x, w = torch.full((40, 300), rank + 1.0), torch.ones(300, 900)
    found = []

    def others() -> None:
        for _ in range(50):
            found.append(weft.all_reduce(torch.ones(20_000)).sum().item())

    thread = threading.Thread(target=others)
    thread.start()
    for _ in range(50):
        y = weft.matmul_all_reduce(x, w, schedule="serial")
        assert (y == 300 * sum(range(1, world + 1))).all()
    thread.join()
    assert found == [20_000.0 * world] * 50


def test_collectives_of_another_thread_do_not_come_between(ranks):
    ranks(2).run(beside_another_thread)


# -- what is said of it ----------------------------------------------------------------------------


def recorded(name: str, link: str) -> tuple[dict[str, int], float]:
    """The bytes by lane of one recorded call, and the seconds in which they came."""
    rank, world = dist.get_rank(), dist.get_world_size()
    weft.configure(link=link)
    try:
        case = Case(name, 1, shape=(20 * world, 300, 300), sizes=(20,))
        for _ in range(2):
            case.weft("serial")
        with weft.record() as recording:
            same(case, "serial")
        said = weft.explain()
    finally:
        weft.configure(link="memory")
    [timeline] = recording.timelines
    assert said.percent_of_ideal is not None
    gathers = name in GATHERS
    assert said.way.startswith("all_") if gathers else said.way.startswith("one GEMM, then")
    assert said.way in str(said)
    assert timeline.matmul_seconds(rank) > 0
    moved = {}
    for span in timeline.spans:
        if span.kind == "copy" and span.lane != f"engine {rank}":
            moved[span.lane] = moved.get(span.lane, 0) + span.num_bytes
    return moved, timeline.communication_seconds(rank)


@pytest.mark.parametrize("name", MATMULS)
def test_a_recording_shows_what_came(ranks, name):
    for rank, (moved, _) in enumerate(ranks(3).run(recorded, name, "memory")):
        peers = [other for other in range(3) if other != rank]
        assert sorted(moved) == [f"engine {other}" for other in peers]
        assert min(moved.values()) > 0
    slow = ranks(2).run(recorded, name, "2MB/s")
    for moved, seconds in slow:
        assert seconds >= sum(moved.values()) / 2e6 * 0.9  # the link's time is seen


# -- the guard of in-kernel schedules --------------------------------------------------------------


def guarded(kind: str) -> list[str]:
    """All calls of a trial give the same, with any weight and any result tensor."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x = integers((4, 24), torch.float32, rank)
    every = [integers((4, 24), torch.float32, s) for s in range(world)]
    w = integers((24, 130), torch.float32, 7)
    weight, options = w, {}
    if kind == "int8":
        weight, options = w.to(torch.int8), {"scale": torch.ones(130)}
    elif kind == "bfloat16":
        weight = w.to(torch.bfloat16)
    elif kind == "out":
        options = {"out": torch.empty(4, 130)}
    ran = []
    with torch.no_grad():
        for _ in range(2 * TURNS * CALLS + 5):
            y = weft.matmul_all_reduce(x, weight, **options)
            assert torch.equal(y, sum(product(one, w) for one in every))
            ran.append(weft.explain().schedule)
    return ran


@pytest.mark.parametrize("kind", ["plain", "int8", "bfloat16", "out"])
def test_in_kernel_is_tried_against_serial(renewed_ranks, kind):
    ran, *others = renewed_ranks(3).run(guarded, kind)
    assert all(other == ran for other in others)
    turns = ["in-kernel@direct"] * CALLS + ["serial@dma"] * CALLS
    assert ran[: 2 * TURNS * CALLS] == turns * TURNS
    assert len(set(ran[2 * TURNS * CALLS :])) == 1  # settled


def links_differ() -> str:
    """A rank whose link is paced does not place its result for kernels."""
    weft.configure(link="1GB/s" if dist.get_rank() else "memory")
    try:
        with pytest.raises(weft.Mismatch) as differ:
            weft.matmul_all_to_all(torch.ones(4, 8), torch.ones(8, 8), [2, 2], [2, 2])
    finally:
        weft.configure(link="memory")
    y = weft.matmul_all_to_all(torch.ones(4, 8), torch.ones(8, 8), [2, 2], [2, 2])
    assert (y == 8).all()
    return str(differ.value)


def test_ranks_that_would_place_memory_differently_do_not_go_on(renewed_ranks):
    first, second = renewed_ranks(2).run(links_differ)
    assert first == second
    assert "ranks disagree" in first
