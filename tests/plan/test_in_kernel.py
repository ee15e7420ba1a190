"""Plans of kernels that communicate by themselves: proved, and meaning what they should; a plan
that is wrong is found out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft import InvalidPlan, Schedule, Unsupported
from weft.operation import find, starts
from weft.plan.embedding_all_to_all import EmbeddingAllToAll
from weft.plan.embedding_gradient import EmbeddingGradient
from weft.plan.interpret import interpret
from weft.plan.matmul_all_reduce import MatmulAllReduce
from weft.plan.matmul_all_to_all import MatmulAllToAll
from weft.plan.tasks import Await, KernelTiles, Lookup, Reduce
from weft.plan.verify import verify

SIZES = st.sampled_from((0, 1, 2, 3, 5, 8, 13, 65, 130))
FUSED = st.sampled_from(("in-kernel", "in-kernel:1", "in-kernel:2", "in-kernel:7"))
CHUNKED = ("serial@dma", "serial@cores", "shard-p2p", "hetero-unfused-1d", "uniform-unfused-1d:3",
           "hetero-fused-1d", "uniform-fused-1d:2", "hetero-unfused-1d-p2p:4@cores")  # fmt: skip


def meaning(plan, seed):
    """The inputs, and what the plan makes of them."""
    values = np.random.default_rng(seed)
    inputs = {
        (b.rank, b.name): values.integers(-4, 5, (b.rows, b.columns)).astype(float)
        for b in plan.buffers
        if b.kind == "input"
    }
    return inputs, interpret(plan, inputs, seed)


def several(data, world):
    return tuple(data.draw(st.lists(SIZES, min_size=world, max_size=world)))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), world=st.integers(1, 5), schedule=FUSED, seed=st.integers(0, 99))
def test_products(data, world, schedule, seed):
    n, inner = data.draw(SIZES), several(data, world)
    dtype = data.draw(st.sampled_from(("float32", "bfloat16", "float64")))
    reduced = MatmulAllReduce(several(data, world), n, inner, dtype)
    splits = tuple(several(data, world) for _ in range(world))
    for op in (reduced, MatmulAllToAll(splits, n, inner, dtype)):
        plan = op.lower(Schedule.parse(schedule))
        verify(plan)
        inputs, outputs = meaning(plan, seed)
        made = [inputs[r, "x"] @ inputs[r, "w"] for r in range(world)]
        for rank in range(world):
            if op is reduced:
                want = sum(made)
            else:
                parts = [np.split(p, starts(s)[1:]) for p, s in zip(made, splits, strict=True)]
                want = np.concatenate([some[rank] for some in parts])
            np.testing.assert_array_equal(outputs[rank, "y"], want)
            if world > 1:
                assert plan.one_launch
                assert not [t for t in plan.tasks if t.lane != "compute"], "nothing is copied"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    data=st.data(),
    world=st.integers(1, 5),
    schedule=FUSED | st.sampled_from(CHUNKED),
    seed=st.integers(0, 99),
)
def test_lookups(data, world, schedule, seed):
    batch, columns = several(data, world), several(data, world)
    op = EmbeddingAllToAll(batch, columns, 3)
    plan = op.lower(Schedule.parse(schedule))
    verify(plan)
    inputs, outputs = meaning(plan, seed)
    whole = np.concatenate([inputs[r, "bags"] for r in range(world)], 1)
    for rank in range(world):
        first = starts(batch)[rank]
        np.testing.assert_array_equal(outputs[rank, "y"], whole[first : first + batch[rank]])
        crossed = sum(op.num_bytes(source, rank) for source in range(world))
        stored = sum(
            plan.num_bytes(region)
            for task in plan.tasks
            for region in task.writes()
            if region.rank == rank != task.rank
        )
        moved = stored if plan.one_launch else sum(plan.bytes_by_engine(rank).values())
        assert moved == crossed, "every byte crosses once"


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_gradients_go_back(world):
    batch, columns = (3, 0, 5, 1, 2)[:world], (2, 4, 0, 1, 3)[:world]
    plan = EmbeddingGradient(batch, columns).lower(Schedule.parse("serial"))
    verify(plan)
    inputs, outputs = meaning(plan, 1)
    whole = np.concatenate([inputs[r, "dy"] for r in range(world)])
    for rank in range(world):
        first = starts(columns)[rank]
        want = whole[:, first : first + columns[rank]]
        np.testing.assert_array_equal(outputs[rank, "dp"], want)


def test_remote_pieces_come_first():
    plan = MatmulAllToAll.of(64, 8, 8, 4).lower(Schedule.parse("in-kernel:2"))
    for rank in range(4):
        makes = [t for t in plan.tasks if t.rank == rank and isinstance(t, KernelTiles)]
        local = [all(r.rank == rank for r in task.writes()) for task in makes]
        assert local == sorted(local), "local pieces come last"
        targets = [region.rank for region in makes[0].writes()]
        assert targets == [(rank + step) % 4 for step in (1, 2, 3)], "staggered"


@pytest.mark.parametrize(
    ("tables", "schedule", "cut"),
    [
        ((8, 8, 8, 8), "in-kernel", [(0, 8), (8, 8), (16, 8), (24, 8)]),
        ((3, 0, 5), "in-kernel:2", [(0, 8), (0, 8)]),
        ((1, 1, 1, 9), "in-kernel:4", [(0, 3), (0, 3), (3, 9), (3, 9)]),
        ((7,) * 40, "in-kernel:8", [(35 * i, 35) for i in range(8)]),
        ((), "in-kernel", []),
    ],
)
def test_lookups_go_table_by_table(tables, schedule, cut):
    """Slices are whole tables, cut by bags where there are few; the bags of peers come first."""
    world, order = 4, (1, 2, 3, 0)
    op = EmbeddingAllToAll((9, 0, 5, 2), (sum(tables),) * world, tables=(tables,) * world)
    plan = op.lower(Schedule.parse(schedule))
    verify(plan)
    for rank in range(world):
        makes = [t for t in plan.tasks if t.rank == rank and isinstance(t, Lookup)]
        assert [(t.sources[0].column, t.sources[0].columns) for t in makes] == cut
        for task in makes:
            targets = [(region.rank - rank) % world for region in task.writes()]
            assert targets == sorted(targets, key=order.index)


@pytest.mark.parametrize("kind", [KernelTiles, Reduce, Await])
def test_a_broken_plan_is_found_out(kind):
    """Without a wait, without a task, or stored elsewhere: none of it goes unseen."""
    plan = MatmulAllReduce.of(2, 12, 3, 3).lower(Schedule.parse("in-kernel:2"))
    verify(plan)
    victim = next(task for task in plan.tasks if isinstance(task, kind) and task.rank == 1)
    broken = []
    if kind is not KernelTiles:
        broken.append(replace(victim, after=()))
    if kind is KernelTiles:
        part = victim.parts[0]
        moved = replace(part, c=part.c._replace(row=0 if part.c.row else 2))
        broken.append(replace(victim, parts=(moved, *victim.parts[1:])))
    if kind is Reduce:
        broken.append(replace(victim, targets=victim.targets[:-1]))
        broken.append(replace(victim, sources=(victim.sources[0],) * 3))
    for task in broken:
        tasks = tuple(task if t.id == victim.id else t for t in plan.tasks)
        with pytest.raises(InvalidPlan):
            verify(replace(plan, tasks=tasks))


def test_sums_go_to_peers_only_from_inside_a_kernel():
    plan = MatmulAllReduce.of(2, 12, 3, 3).lower(Schedule.parse("in-kernel"))
    with pytest.raises(InvalidPlan, match="sums into another rank's memory"):
        verify(replace(plan, one_launch=False))


@pytest.mark.parametrize(
    ("name", "schedule", "said"),
    [
        ("matmul_all_reduce", "in-kernel@dma", "no engine moves them: in-kernel@direct does"),
        ("all_gather_matmul", "in-kernel", "cannot communicate from inside its kernel"),
        ("matmul_reduce_scatter", "in-kernel", "cannot communicate from inside its kernel"),
        ("embedding_all_to_all", "adaptive", "nothing to adapt to"),
        ("embedding_all_to_all", "hetero-fused-2d", "slice of the batch"),
        ("embedding_all_to_all", "hetero-unfused-1d@direct", "in-kernel@direct"),
        ("embedding_gradient", "adaptive", "use serial"),
    ],
)
def test_what_cannot_be_is_refused(name, schedule, said):
    with pytest.raises(Unsupported, match=said):
        find(name).of(8, 4, 2, 2).lower(Schedule.parse(schedule))


def test_the_name_of_the_schedule():
    schedule = Schedule.parse("in-kernel")
    assert (schedule.name, schedule.engine, schedule.fusion) == (
        "in-kernel@direct",
        "direct",
        "kernel",
    )
    assert Schedule.parse("in-kernel:16").name == "in-kernel:16@direct"
    assert Schedule.parse("in-kernel:16@direct") == Schedule.parse("in-kernel:16")
    for name in ("matmul_all_reduce", "matmul_all_to_all", "embedding_all_to_all"):
        assert schedule in Schedule.space(find(name).of(8, 4, 2, 2))
    assert schedule not in Schedule.space(find("all_gather_matmul").of(8, 4, 2, 2))
