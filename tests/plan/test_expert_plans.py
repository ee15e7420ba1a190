"""Exchanges with several experts per rank: plans are proved, mean what they should, are priced."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interpreted import POSSIBLE, proved

from weft import InvalidPlan, Schedule, Unsupported
from weft.machine import load
from weft.operation import starts
from weft.plan.all_to_all_matmul import AllToAllMatmul
from weft.plan.matmul_all_to_all import MatmulAllToAll
from weft.plan.tasks import Copy, Matmul
from weft.plan.verify import verify
from weft.select import heuristic
from weft.simulate.simulation import run

sizes = st.sampled_from((0, 0, 1, 2, 3, 5, 8))


@st.composite
def operations(draw):
    world, experts = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    dtype = draw(st.sampled_from(("float32", "bfloat16")))

    def several(count):
        return tuple(draw(st.lists(sizes, min_size=count, max_size=count)))

    splits = tuple(several(world * experts) for _ in range(world))
    if draw(st.booleans()):
        columns = tuple(several(2) for _ in range(world))
        gathered = draw(st.booleans())
        return AllToAllMatmul(splits, columns, draw(sizes), dtype, gathered, experts=experts)
    return MatmulAllToAll(splits, draw(sizes), several(world), dtype, experts=experts)


def parts_of(rows, splits):
    return np.split(rows, starts(splits)[1:])


def expected(op, inputs, rank):
    """The outputs of a rank by plain products."""
    each, ranks = op.experts, range(op.world)
    if isinstance(op, AllToAllMatmul):
        sent = [parts_of(inputs[r, "x"], op.splits[r]) for r in ranks]
        by_expert = [np.concatenate([sent[r][rank * each + e] for r in ranks]) for e in range(each)]
        wanted = {
            f"y{i}": np.concatenate([by_expert[e] @ inputs[rank, f"w{i}.{e}"] for e in range(each)])
            for i in range(2)
        }
        return {**wanted, **({"gathered": np.concatenate(by_expert)} if op.gathered else {})}
    came = []
    for maker in ranks:
        by_expert = [op.splits[maker][e::each] for e in range(each)]
        rows = parts_of(inputs[maker, "x"], [n for some in by_expert for n in some])
        for e in range(each):
            came.append(rows[e * op.world + rank] @ inputs[maker, f"w0.{e}"])
    return {"y": np.concatenate(came)}


def check(op, schedule, seed):
    reason = op.refuses(schedule)
    if reason is not None:
        with pytest.raises(Unsupported, match=reason):
            op.lower(schedule)
        return
    plan = op.lower(schedule)
    inputs, outputs = proved(plan, seed)
    for rank in range(op.world):
        for name, want in expected(op, inputs, rank).items():
            np.testing.assert_array_equal(outputs[rank, name], want)
        crossed = sum(op.num_bytes(source, rank) for source in range(op.world))
        if schedule.engine != "direct":
            assert sum(plan.bytes_by_engine(rank).values()) == crossed


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(op=operations(), schedule=st.sampled_from(POSSIBLE), seed=st.integers(0, 2**20))
def test_random_experts_under_random_schedules(op, schedule, seed):
    check(op, schedule, seed)


def grouped(kind, world=3, experts=4, rows=16, n=8, k=8, dtype="float32"):
    splits = ((rows,) * (world * experts),) * world
    if kind is AllToAllMatmul:
        return AllToAllMatmul(splits, ((n, n),) * world, k, dtype, experts=experts)
    return MatmulAllToAll(splits, n, (k,) * world, dtype, experts=experts)


KINDS = (AllToAllMatmul, MatmulAllToAll)


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_space(kind):
    op = grouped(kind)
    space = Schedule.space(op)
    assert Schedule.parse("serial") in space
    assert Schedule.parse("adaptive") in space
    assert all(s.fusion in ("unfused", "adaptive") or s.serial for s in space)
    for schedule in space:
        check(op, schedule, 1)


def test_serial_has_one_product_per_expert_and_weight():
    for kind, count in ((AllToAllMatmul, 8), (MatmulAllToAll, 4)):
        plan = grouped(kind).lower(Schedule.parse("serial"))
        assert sum(isinstance(t, Matmul) and t.rank == 1 for t in plan.tasks) == count


def test_chunks_end_with_their_expert_and_adaptive_may_join_ranks():
    plan = grouped(AllToAllMatmul, rows=32).lower(Schedule.parse("adaptive@dma"))
    products = [t for t in plan.tasks if isinstance(t, Matmul) and t.rank == 0 and t.loose]
    assert all(t.a.row // 96 == (t.a.row + t.a.rows - 1) // 96 for t in products)
    weights = {t.merge: {other.b for other in products if other.merge == t.merge} for t in products}
    assert all(len(some) == 1 for some in weights.values()), "joined chunks have one weight"
    joined = sorted((t.a.row, t.a.rows) for t in products if t.merge == 0)
    assert joined[0][0] + sum(rows for _, rows in joined) == joined[-1][0] + joined[-1][1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", ["serial", "hetero-unfused-1d", "adaptive@direct"])
def test_a_wrong_expert_or_a_missing_wait_is_refused(kind, schedule):
    plan = grouped(kind).lower(Schedule.parse(schedule))
    other = [t.b for t in plan.tasks if isinstance(t, Matmul)]
    tried = 0
    for task in plan.tasks:
        if isinstance(task, Matmul):
            b = next(b for b in other if b.rank == task.rank and b != task.b)
            wrong = replace(task, b=b)
        elif isinstance(task, Copy) and task.target.row:
            wrong = replace(task, target=task.target._replace(row=0))
        else:
            continue
        tried += 1
        if tried % 7 == 0:
            tasks = list(plan.tasks)
            tasks[task.id] = wrong
            with pytest.raises(InvalidPlan):
                verify(replace(plan, tasks=tuple(tasks)))
    assert tried > 14


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_simulated_and_chosen(kind):
    machine = load("mi300x")
    op = grouped(kind, 8, 8, 64, 1024, 1024, "bfloat16")
    alone = run(op.compute_only().lower(Schedule.parse("serial")), machine).seconds
    serial = run(op.lower(Schedule.parse("serial")), machine).seconds
    assert serial > alone * 0.9
    choice = heuristic.choose(machine, op)
    assert op.refuses(choice.schedule) is None
    assert all(op.refuses(rival) is None for rival in choice.rivals)
    assert run(op.lower(choice.schedule), machine).seconds <= serial
    assert op.num_flops(0) == 2 * 8 * 8 * 64 * sum(getattr(op, "columns", ((1024,),))[0]) * 1024
