"""The adaptive policy: what is merged, and what the simulator makes of it."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.machine import Machine, load
from weft.plan.adaptive import largest_run, merged
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.plan.tasks import Matmul, Region
from weft.schedule import Schedule
from weft.simulate import run


def chunks(*rows: tuple[int, int], merge: int = 0, buffer: str = "g") -> list[Matmul]:
    """Matmuls of (row, rows), with a and c in the same places."""
    return [
        Matmul(
            id=1000 * merge + row,
            rank=0,
            after=(),
            label=f"{row}",
            a=Region(0, buffer, row, size, 0, 8),
            b=Region(0, f"w{merge}", 0, 8, 0, 4),
            c=Region(0, f"y{merge}", row, size, 0, 4),
            merge=merge,
        )
        for row, size in rows
    ]


def labels(run: list[Matmul]) -> list[str]:
    return [task.label for task in run]


def test_the_largest_run_of_neighbours_is_taken() -> None:
    ready = chunks((12, 4), (0, 4), (20, 4), (4, 4), (24, 4), (28, 4))
    assert labels(largest_run(ready)) == ["20", "24", "28"]
    assert labels(largest_run(ready[:4])) == ["0", "4"]


def test_rows_count_not_chunks() -> None:
    assert labels(largest_run(chunks((0, 1), (1, 1), (2, 1), (10, 8)))) == ["10"]


def test_of_equal_runs_the_highest_is_taken() -> None:
    assert labels(largest_run(chunks((8, 4), (0, 4)))) == ["0"]


def test_nothing_and_one() -> None:
    (only,) = chunks((4, 4))
    assert largest_run([]) == []
    assert largest_run([only]) == [only]
    assert merged([only]) is only


def test_runs_stay_in_one_buffer() -> None:
    here, there = chunks((0, 4)), chunks((4, 4), buffer="x")
    assert labels(largest_run([*here, *there])) == ["0"]


def test_rows_must_be_neighbours_in_a_too() -> None:
    first, second = chunks((0, 4), (4, 4))
    moved = replace(second, a=Region(0, "g", 40, 4, 0, 8))
    assert labels(largest_run([first, moved])) == ["0"]


def test_every_b_has_its_own_runs() -> None:
    ready = [*chunks((0, 4), (4, 4)), *chunks((0, 4), (4, 4), (8, 4), merge=1)]
    run = largest_run(ready)
    assert [(task.merge, task.label) for task in run] == [(1, "0"), (1, "4"), (1, "8")]


def test_merged_is_one_gemm_over_all_rows() -> None:
    one = merged(chunks((8, 4), (12, 4), (16, 2)))
    assert (one.a.row, one.a.rows, one.c.row, one.c.rows) == (8, 10, 8, 10)
    assert one.b == Region(0, "w0", 0, 8, 0, 4)
    assert one.label == "8 +2"


@given(st.integers(0, 10_000))
def test_no_run_has_more_rows(seed: int) -> None:
    choice = random.Random(seed)
    ready = [
        task
        for merge in range(choice.randint(1, 3))
        for task in chunks(*((4 * i, 4) for i in range(40) if choice.random() < 0.6), merge=merge)
    ]
    choice.shuffle(ready)
    run = largest_run(ready)
    assert len({task.merge for task in run}) <= 1
    for one, after in pairwise(run):
        assert one.c.row + one.c.rows == after.c.row
    there = {(task.merge, task.c.row) for task in ready}
    longest = 0
    for merge, row in there:
        length = 0
        while (merge, row + 4 * length) in there:
            length += 1
        longest = max(longest, length)
    assert len(run) == longest


def _node(**launch: float) -> Machine:
    node = load("mi300x")
    return replace(node, launch=replace(node.launch, **launch))


def _matmuls(operation: AllGatherMatmul, node: Machine) -> list[tuple[str, int]]:
    simulation = run(operation.lower(Schedule.parse("adaptive:8@dma")), node)
    return [(p.task.label, len(p.run)) for p in simulation.compute_pieces(0)]


def test_what_arrived_during_a_long_gemm_is_merged() -> None:
    # Compute is the bottleneck: the whole remote shard is there when the local one is done.
    operation = AllGatherMatmul.of(16384, 16384, 8192, 2, "bfloat16")
    assert _matmuls(operation, _node()) == [("local shard", 1), ("x1[0:1024] +7", 8)]


def test_what_arrives_slowly_is_multiplied_one_by_one() -> None:
    operation = AllGatherMatmul.of(16384, 64, 8192, 2, "bfloat16")
    found = _matmuls(operation, _node())
    assert [count for _, count in found] == [1] * 9


def test_a_decision_is_paid_for_every_gemm() -> None:
    operation = AllGatherMatmul.of(16384, 64, 8192, 2, "bfloat16")
    plan = operation.lower(Schedule.parse("adaptive:8@dma"))
    quick, slow = (run(plan, _node(decision=d)) for d in (0.0, 5e-6))
    assert slow.seconds - quick.seconds == pytest.approx(5e-6)  # only the last is not hidden
    launches = [sum(p.launch for p in s.compute_pieces(0)) for s in (quick, slow)]
    assert launches[1] - launches[0] == pytest.approx(8 * 5e-6)


def test_every_rank_does_all_its_work_with_several_b() -> None:
    operation = AllGatherMatmul.of(2048, (256, 128), 512, 4, "bfloat16")
    plan = operation.lower(Schedule.parse("adaptive:8@dma"))
    simulation = run(plan, load("mi300x"))
    done = sorted(task.id for piece in simulation.pieces for task in piece.run)
    assert done == list(range(len(plan.tasks)))
