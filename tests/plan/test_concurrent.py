"""A GEMM and a collective as one plan: proved, and what plain numpy says it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from weft.errors import InvalidPlan, Unsupported
from weft.plan.concurrent import COLLECTIVES, Concurrent
from weft.plan.interpret import interpret
from weft.plan.tasks import Copy, Matmul
from weft.plan.verify import verify
from weft.schedule import Schedule
from weft.strategy import Strategy

STRATEGIES = [
    Strategy.parse(name)
    for name in ("serial", "concurrent", "prioritized", "partitioned:8", "dma", "dma+trimmed:8")
]
SIZES = [  # m, n, k, rows of every rank, columns
    (3, 5, 7, (4,), 3),
    (3, 5, 7, (4, 4), 3),
    (13, 7, 11, (5, 0, 3), 2),
    (0, 0, 0, (1, 2, 3, 4), 5),
    (2, 3, 0, (7, 7, 7), 1),
    (4, 4, 4, (0, 0), 3),
    (1, 1, 1, (17,) * 8, 2),
]


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_strategy_gives_what_numpy_gives(collective, sizes) -> None:
    m, n, k, rows, columns = sizes
    operation = Concurrent(m, n, k, collective, rows, columns)
    world, random = operation.world, np.random.default_rng(1)
    inputs = {}
    for rank in range(world):
        inputs[rank, "a"] = random.integers(-4, 5, (m, k)).astype(float)
        inputs[rank, "b"] = random.integers(-4, 5, (k, n)).astype(float)
        inputs[rank, "x"] = random.integers(-4, 5, (rows[rank], columns)).astype(float)
    for seed, strategy in enumerate(STRATEGIES):
        plan = operation.lower(strategy)
        verify(plan)
        assert plan.schedule is strategy
        assert set(plan.workspace) == {0}
        found = interpret(plan, inputs, seed)
        for rank in range(world):
            if m * n:
                assert np.array_equal(found[rank, "c"], inputs[rank, "a"] @ inputs[rank, "b"])
            pieces = []
            for peer in range(world):
                x = inputs[peer, "x"]
                if peer != rank:
                    cut = np.array_split(x, world)[rank] if collective == "all_to_all" else x
                    pieces.append(cut)
            wanted = np.concatenate(pieces) if pieces else np.empty((0, columns))
            assert np.array_equal(found[rank, "received"], wanted)


def test_only_serial_waits_and_order_says_who_is_first() -> None:
    operation = Concurrent.of((8, 8, 8), "all_gather", 4096, 2)
    kinds = {}
    for strategy in STRATEGIES:
        plan = operation.lower(strategy)
        kinds[strategy.base] = [type(task) for task in plan.tasks if task.rank == 0]
        waiting = {task.id for task in plan.tasks if task.after}
        assert waiting == (
            {t.id for t in plan.tasks if isinstance(t, Matmul)} if strategy.serial else set()
        )
        copies = [task for task in plan.tasks if isinstance(task, Copy)]
        assert {task.engine for task in copies} == {strategy.engine}
    assert kinds["concurrent"] == [Matmul, Copy]
    assert kinds["prioritized"] == kinds["serial"] == [Copy, Matmul]


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_bytes_are_as_libraries_count_them(collective) -> None:
    operation = Concurrent.of((1, 1, 1), collective, 896 << 20, 8, "bfloat16")
    assert operation.total_bytes == 896 << 20
    assert operation.num_bytes(0, 1) == (896 << 20) // 8
    assert operation.num_bytes(3, 3) == 0
    plan = operation.lower(Strategy.of("dma"))
    assert plan.bytes_by_engine(0) == {"dma": 7 * (896 << 20) // 8}
    odd = Concurrent.of((1, 1, 1), collective, 12345, 3)
    assert 12345 <= odd.total_bytes <= 12345 + 3 * 4096
    assert Concurrent.of((1, 1, 1), collective, 0, 3).total_bytes == 0


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_piece_in_the_wrong_place_is_found(collective) -> None:
    plan = Concurrent(2, 2, 2, collective, (6, 6, 6), 4).lower(Strategy.of("dma"))
    copies = [task for task in plan.tasks if isinstance(task, Copy) and task.rank == 0]
    one, two = copies
    swapped = {one.id: replace(one, target=two.target), two.id: replace(two, target=one.target)}
    tasks = tuple(swapped.get(task.id, task) for task in plan.tasks)
    with pytest.raises(InvalidPlan, match="something else than x@"):
        verify(replace(plan, tasks=tasks))
    lost = [task for task in plan.tasks if task is not plan.tasks[-1]]
    with pytest.raises(InvalidPlan):
        verify(replace(plan, tasks=tuple(lost)))


def test_bad_sizes_and_schedules_are_refused() -> None:
    with pytest.raises(Unsupported, match="there is no collective"):
        Concurrent(1, 1, 1, "broadcast", (1, 1))  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="zero or more"):
        Concurrent(1, 1, 1, "all_gather", (1, -1))
    with pytest.raises(Unsupported, match="planned by a strategy"):
        Concurrent(1, 1, 1, "all_gather", (1, 1)).lower(Schedule.parse("serial"))


@pytest.mark.parametrize(("kind", "sent"), [("reduce_scatter", 3 * 256), ("all_reduce", 6 * 256)])
def test_collectives_that_add_send_as_many_bytes_as_they_do(kind: str, sent: int) -> None:
    moved = 2048 if kind == "all_reduce" else None
    operation = Concurrent.of((8, 8, 8), kind, 1024, 4, "float32", moved)  # type: ignore[arg-type]
    assert operation.total_bytes == 1024
    assert sum(operation.num_bytes(0, peer) for peer in range(4)) == sent
    verify(operation.lower(Strategy.of("prioritized")))
    with pytest.raises(Unsupported, match="copy engines cannot add"):
        operation.lower(Strategy.of("dma"))
