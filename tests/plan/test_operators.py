"""The further operations under every schedule: plans are proved, and mean what they should."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interpreted import POSSIBLE, proved

from weft import InvalidPlan, Schedule, Unsupported
from weft.dtype import ITEM_BYTES
from weft.machine import load
from weft.operation import find, split, starts
from weft.plan.all_to_all_matmul import AllToAllMatmul
from weft.plan.gather_contract import GatherContract
from weft.plan.matmul_all_reduce import MatmulAllReduce, shares_columns
from weft.plan.matmul_all_to_all import MatmulAllToAll
from weft.plan.matmul_reduce_scatter import MatmulReduceScatter
from weft.plan.tasks import Copy, Matmul, Reduce
from weft.plan.verify import verify
from weft.simulate.simulation import run

NAMES = (
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "all_to_all_matmul",
    "gather_contract",
)
sizes = st.sampled_from((0, 1, 2, 3, 4, 5, 7, 8, 13))


@st.composite
def operations(draw, name):
    world = draw(st.integers(1, 5))
    dtype = draw(st.sampled_from(("float32", "float64", "bfloat16", "float16")))

    def several(what=sizes):
        return tuple(draw(st.lists(what, min_size=world, max_size=world)))

    n, k, rows, inner = draw(sizes), draw(sizes), several(), several()
    splits = tuple(several() for _ in range(world))
    columns = tuple((size,) for size in several())
    if name == "matmul_reduce_scatter":
        return MatmulReduceScatter(rows, n, inner, dtype)
    if name == "matmul_all_reduce":
        return MatmulAllReduce(rows, n, inner, dtype)
    if name == "matmul_all_to_all":
        return MatmulAllToAll(splits, n, inner, dtype)
    if name == "all_to_all_matmul":
        return AllToAllMatmul(splits, columns, k, dtype, draw(st.booleans()))
    if draw(st.booleans()):
        taken = (tuple((0, size) for size in rows),) * world
        return GatherContract(rows, taken, k, columns, dtype)
    taken = tuple(tuple((sum(some[:rank]), some[rank]) for some in splits) for rank in range(world))
    return GatherContract(tuple(map(sum, splits)), taken, k, columns, dtype)


def expected(op, inputs, rank):
    """(output's name, what it must be) for a rank, by plain products."""
    ranks = range(op.world)
    if isinstance(op, MatmulReduceScatter):
        total = sum(inputs[r, "x"] @ inputs[r, "w"] for r in ranks)
        first = starts(op.rows)[rank]
        return "y", total if op.everywhere else total[first : first + op.rows[rank]]
    if isinstance(op, MatmulAllToAll):
        made = [np.split(inputs[r, "x"] @ inputs[r, "w"], starts(op.splits[r])[1:]) for r in ranks]
        return "y", np.concatenate([parts[rank] for parts in made])
    if isinstance(op, AllToAllMatmul):
        sent = [np.split(inputs[r, "x"], starts(op.splits[r])[1:]) for r in ranks]
        return "y0", np.concatenate([parts[rank] for parts in sent]) @ inputs[rank, "w0"]
    taken = [inputs[r, "x"][first : first + rows] for r, (first, rows) in enumerate(op.taken[rank])]
    return "g0", np.concatenate(taken).T @ inputs[rank, "d0"]


def check(op, schedule, seed):
    reason = op.refuses(schedule) if isinstance(op, GatherContract) else None
    if reason is not None:
        with pytest.raises(Unsupported, match=reason):
            op.lower(schedule)
        return
    plan = op.lower(schedule)
    inputs, outputs = proved(plan, seed)
    for rank in range(op.world):
        name, want = expected(op, inputs, rank)
        np.testing.assert_array_equal(outputs[rank, name], want)
        crossed = sum(op.num_bytes(source, rank) for source in range(op.world))
        if op.name == "matmul_all_reduce" and shares_columns(schedule, op.m, op.world):
            own = split(op.n, op.world)[rank]
            moved = (op.world - 1) * own + op.n - own
            crossed = moved * op.m * ITEM_BYTES[op.dtype]
        if schedule.engine != "direct":
            assert sum(plan.bytes_by_engine(rank).values()) == crossed


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_random_operations_under_random_schedules(name, data):
    op = data.draw(operations(name))
    check(op, data.draw(st.sampled_from(POSSIBLE)), data.draw(st.integers(0, 2**20)))


@pytest.mark.parametrize("name", NAMES)
def test_the_whole_space(name):
    for world in (1, 2, 4):
        op = find(name).of(2 * world + 3, 5, 7, world)
        space = Schedule.space(op)
        assert Schedule.parse("serial") in space
        for schedule in space:
            check(op, schedule, world)


def test_products_for_peers_come_first_and_the_next_rank_before_the_one_after_it():
    plan = MatmulReduceScatter.of(12, 4, 6, 3).lower(Schedule.parse("adaptive:2"))
    made = [t.label for t in plan.lanes[(1, "compute")] if isinstance(t, Matmul)]
    assert [label[:2] for label in made] == ["y2", "y0", "y2", "y0", "y1"]


def test_sums_are_in_the_order_of_ranks():
    for name in ("adaptive@dma", "adaptive:3@direct", "hetero-fused-2d@cores"):
        plan = MatmulReduceScatter.of(30, 4, 6, 4).lower(Schedule.parse(name))
        for task in plan.tasks:
            if isinstance(task, Reduce):
                own = [r.buffer for r in task.sources].index("partial")
                assert own == task.rank
                boxes = [r.row for r in task.sources if r.buffer == "inbox"]
                assert boxes == sorted(boxes)


def test_direct_makes_products_where_they_are_needed_and_copies_nothing():
    for name in ("matmul_reduce_scatter", "matmul_all_to_all"):
        plan = find(name).of(8, 4, 6, 2).lower(Schedule.parse("adaptive@direct"))
        assert not any(isinstance(t, Copy) for t in plan.tasks)
        assert any(t.c.rank != t.rank for t in plan.tasks if isinstance(t, Matmul))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("schedule", ["serial", "hetero-unfused-1d", "hetero-unfused-1d@direct"])
def test_a_changed_task_is_refused(name, schedule):
    """A term added twice, or a task that does not wait for another lane: never unnoticed."""
    plan = find(name).of(12, 4, 6, 3).lower(Schedule.parse(schedule))
    for task in plan.tasks:
        if isinstance(task, Reduce) and len(task.sources) > 1:
            swapped = replace(task, sources=(task.sources[0],) * len(task.sources))
            with pytest.raises(InvalidPlan):
                verify(_with(plan, swapped))
        if task.after:
            crossing = {plan.tasks[t].lane for t in task.after} != {task.lane}
            if crossing:
                with pytest.raises(InvalidPlan):
                    verify(_with(plan, replace(task, after=())))


def _with(plan, task):
    tasks = list(plan.tasks)
    tasks[task.id] = task
    return replace(plan, tasks=tuple(tasks))


@pytest.mark.parametrize("name", NAMES)
def test_the_simulator_runs_every_plan(name):
    machine = load("mi300x")
    op = find(name).of(2048, 512, 1024, 8, "bfloat16")
    alone = run(op.compute_only().lower(Schedule.parse("serial")), machine).seconds
    for schedule in Schedule.space(op):
        simulation = run(op.lower(schedule), machine)
        assert simulation.seconds >= alone * 0.9
        assert len(simulation.timeline().spans) >= op.world
