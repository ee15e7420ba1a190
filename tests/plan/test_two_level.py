"""Plans on two levels: right for any sizes, and what crosses the network crosses it once."""

from __future__ import annotations

import numpy as np
import pytest
from interpreted import proved

from weft.errors import Unsupported
from weft.operation import split
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.plan.matmul_reduce_scatter import MatmulReduceScatter
from weft.plan.network import lower
from weft.plan.tasks import Copy
from weft.schedule import Schedule

NODES = ((0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1), (0, 1, 1), (0, 0, 1, 1, 2, 2), (0, 0, 1, 2))
SCHEDULES = ("serial", "hetero-unfused-1d", "adaptive", "adaptive:3", "hetero-unfused-1d:5")


def crossing(plan, nodes):
    """Bytes that cross the network."""
    return sum(
        plan.num_bytes(task.source)
        for task in plan.tasks
        if isinstance(task, Copy) and nodes[task.source.rank] != nodes[task.target.rank]
    )


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("m", [0, 1, 5, 67, 128])
@pytest.mark.parametrize("gathered", [False, True])
def test_gathering(nodes, schedule, m, gathered):
    world = len(nodes)
    op = AllGatherMatmul(split(m, world), ((3, 2),) * world, 4, "float32", gathered)
    plan = lower(op, Schedule.parse(schedule), nodes)
    inputs, made = proved(plan, m)
    x = np.concatenate([inputs[(rank, "x")] for rank in range(world)])
    for rank in range(world):
        for i in range(2):
            assert np.array_equal(made[(rank, f"y{i}")], x @ inputs[(rank, f"w{i}")])
        if gathered:
            assert np.array_equal(made[(rank, "gathered")], x)
    machines = len(set(nodes))
    assert crossing(plan, nodes) == m * 4 * 4 * (machines - 1), "every row, once for each machine"


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("m", [0, 1, 5, 67, 128])
def test_scattering(nodes, schedule, m):
    world = len(nodes)
    op = MatmulReduceScatter(split(m, world), 3, tuple(range(1, world + 1)))
    plan = lower(op, Schedule.parse(schedule), nodes)
    inputs, made = proved(plan, m)
    total = sum(inputs[(rank, "x")] @ inputs[(rank, "w")] for rank in range(world))
    parts = np.split(total, np.cumsum(op.rows)[:-1])
    for rank in range(world):
        assert np.array_equal(made[(rank, "y")], parts[rank])
    if plan.schedule.serial:
        return
    machines = len(set(nodes))
    assert crossing(plan, nodes) == m * 3 * 4 * (machines - 1), "every row, once from each machine"


def test_half_precision_is_summed_flat():
    op = MatmulReduceScatter.of(64, 3, 4, 4, "bfloat16")
    plan = lower(op, Schedule.parse("adaptive:2"), (0, 0, 1, 1))
    assert plan is op.lower(Schedule.parse("adaptive:2"))


def test_direct_is_refused():
    with pytest.raises(Unsupported, match="adaptive@dma"):
        lower(AllGatherMatmul.of(8, 8, 8, 2), Schedule.parse("adaptive@direct"), (0, 1))
