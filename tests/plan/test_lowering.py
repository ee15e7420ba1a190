"""Every schedule, over random shapes and worlds: its plan is proved, and means the product."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interpreted import POSSIBLE, proved

from weft import Schedule
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.plan.tasks import Copy, Matmul
from weft.schedule import MAIN_NAMES

SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 11, 13)
sizes = st.sampled_from(SIZES)


@st.composite
def operations(draw):
    world = draw(st.integers(1, 8))
    rows = tuple(draw(st.lists(sizes, min_size=world, max_size=world)))
    num_weights = draw(st.sampled_from((1, 1, 2, 3)))
    columns = tuple(
        tuple(draw(st.lists(st.sampled_from((0, 1, 3, 4)), min_size=n, max_size=n)))
        for n in (num_weights,) * world
    )
    dtype = draw(st.sampled_from(("float32", "float64", "bfloat16", "float16")))
    return AllGatherMatmul(rows, columns, draw(sizes), dtype, draw(st.booleans()))


def check(operation: AllGatherMatmul, schedule: Schedule, seed: int) -> None:
    """Proves the plan, then runs it in a random order and compares with the plain product."""
    plan = operation.lower(schedule)
    inputs, outputs = proved(plan, seed)
    x = np.concatenate([inputs[(rank, "x")] for rank in range(operation.world)])
    for rank in range(operation.world):
        for i in range(len(operation.columns[rank])):
            np.testing.assert_array_equal(outputs[(rank, f"y{i}")], x @ inputs[(rank, f"w{i}")])
        if operation.gathered:
            np.testing.assert_array_equal(outputs[(rank, "gathered")], x)
    expected = sum(operation.num_bytes(s, r) for s in range(operation.world) for r in range(1))
    moved = plan.bytes_by_engine(0)
    if moved:
        used = set(moved)
        wanted = {"dma", "direct"} if schedule.engine == "direct" else {schedule.engine}
        assert used <= wanted
    crossings = (schedule.engine == "direct") * _num_reads(operation) + (
        schedule.engine != "direct" or operation.gathered
    )
    assert sum(moved.values()) == expected * crossings


def _num_reads(operation: AllGatherMatmul) -> int:
    """How often `direct` reads a peer's shard in place on rank 0: once for each w with columns."""
    return sum(n > 0 for n in operation.columns[0])


@given(operations(), st.sampled_from(POSSIBLE), st.integers(0, 2**20))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_random_operations_under_random_schedules(operation, schedule, seed):
    check(operation, schedule, seed)


@pytest.mark.parametrize("world", range(1, 9))
def test_the_whole_space(world):
    dtype = "bfloat16" if world in (2, 5) else "float32"
    for m, n, k in [(0, 3, 4), (1, 1, 1), (world - 1, 2, 3), (2 * world + 3, (3, 0), 13)]:
        operation = AllGatherMatmul.of(m, n, k, world, dtype, gathered=m % 2 == 1)
        for schedule in Schedule.space(operation):
            check(operation, schedule, seed=m)


@pytest.mark.parametrize("empty", ["m", "n", "k"])
def test_an_empty_side(empty):
    for schedule in POSSIBLE:
        m, n, k = ((0 if side == empty else 7) for side in "mnk")
        check(AllGatherMatmul.of(m, n, k, 3, "bfloat16", True), schedule, 1)


@pytest.mark.parametrize("base", MAIN_NAMES)
def test_plans_are_values(base):
    operation, schedule = AllGatherMatmul.of(9, 4, 6, 3), Schedule.parse(base)
    plan = operation.lower(schedule)
    assert plan is operation.lower(schedule)
    assert plan == type(plan)(operation, schedule, plan.buffers, plan.tasks, plan.workspace)


def test_serial_computes_nothing_before_all_has_arrived():
    plan = AllGatherMatmul.of(12, 4, 6, 3).lower(Schedule.parse("serial"))
    for task in plan.tasks:
        if isinstance(task, Matmul):
            copies = {t.id for t in plan.tasks if isinstance(t, Copy) and t.rank == task.rank}
            assert set(task.after) == copies


def test_hetero_starts_with_local_data_and_waits_for_nothing():
    for base in ("hetero-fused-1d", "hetero-unfused-1d", "hetero-fused-2d", "adaptive"):
        plan = AllGatherMatmul.of(12, 4, 6, 3).lower(Schedule.parse(base))
        for rank in range(3):
            first = plan.lanes[(rank, "compute")][0]
            assert isinstance(first, Matmul)
            assert first.a.key == (rank, "x")
            assert first.after == ()


def test_depth_is_the_number_of_chunks_of_a_shard():
    operation = AllGatherMatmul.of(40, 4, 6, 2)
    for depth in (1, 2, 5, 20, 64):
        for base in ("hetero-unfused-1d", "adaptive", "hetero-fused-1d"):
            plan = operation.lower(Schedule.parse(f"{base}:{depth}"))
            copies = [t for t in plan.tasks if isinstance(t, Copy) and t.rank == 0]
            assert len(copies) == min(depth, 20)


def test_one_peer_at_a_time_is_one_peer_at_a_time():
    plan = AllGatherMatmul.of(12, 4, 6, 4).lower(Schedule.parse("shard-p2p"))
    pulls = [t for t in plan.tasks if isinstance(t, Copy) and t.rank == 2]
    assert [t.peer for t in pulls] == [3, 0, 1]
    assert [t.after for t in pulls] == [(), (pulls[0].id,), (pulls[1].id,)]
