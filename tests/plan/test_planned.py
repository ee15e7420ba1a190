"""Adaptive schedules that are decided ahead, and the order in which ranks enqueue their tasks."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from weft.errors import InvalidPlan
from weft.ops.operator import operators
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.plan.issue import check_issue_order, issue_order
from weft.plan.matmul_all_reduce import MatmulAllReduce
from weft.plan.matmul_reduce_scatter import MatmulReduceScatter
from weft.plan.planned import Rates, planned
from weft.plan.tasks import Copy, Matmul
from weft.plan.verify import verify
from weft.schedule import Schedule

BALANCED = Rates(link=1e9, flops=1e12, memory=1e11)
ADAPTIVE = Schedule.parse("adaptive@dma")


def _operations():
    yield AllGatherMatmul((512,) * 4, ((256,),) * 4, 512)
    yield AllGatherMatmul((37, 0, 5), ((8,), (3,), (0,)), 16)
    yield MatmulReduceScatter((200,) * 3, 96, (64, 0, 32))
    yield MatmulAllReduce((100,) * 4, 64, (32,) * 4)


@pytest.mark.parametrize("engine", ["dma", "cores", "direct"])
@pytest.mark.parametrize("operation", list(_operations()), ids=lambda operation: operation.label)
def test_a_planned_schedule_is_proved_like_any_other(operation, engine):
    for link in (1e6, 1e9, 1e13):
        plan = planned(operation.lower(ADAPTIVE.with_engine(engine)), BALANCED._replace(link=link))
        verify(plan)
        assert not any(task.loose for task in plan.tasks)


def test_a_plan_without_choices_stays_as_it_is():
    plan = AllGatherMatmul((64,) * 2, ((8,),) * 2, 8).lower(Schedule.parse("hetero-fused-1d"))
    assert planned(plan, BALANCED) is plan


def test_pieces_follow_the_speed_of_the_link():
    """A fast link brings everything before the local product ends; a slow one, piece by piece."""
    plan = AllGatherMatmul((1024,) * 2, ((1024,),) * 2, 1024).lower(ADAPTIVE)

    def pieces(link):
        made = planned(plan, BALANCED._replace(link=link))
        return [t for t in made.tasks if isinstance(t, Matmul) and t.rank == 0]

    assert len(pieces(1e13)) == 2
    assert len(pieces(1e9)) > 3
    assert sum(task.c.rows for task in pieces(1e9)) == 2048


def test_chunks_that_are_multiplied_together_are_copied_together():
    plan = AllGatherMatmul((1024,) * 2, ((1024,),) * 2, 1024).lower(ADAPTIVE)
    made = planned(plan, BALANCED._replace(link=1e13))
    copies = [task for task in made.tasks if isinstance(task, Copy) and task.rank == 0]
    assert [task.source.rows for task in copies] == [1024]
    assert len([task for task in plan.tasks if isinstance(task, Copy) and task.rank == 0]) > 4


def test_all_ranks_decide_alike():
    plan = MatmulAllReduce((256,) * 4, 256, (64,) * 4).lower(ADAPTIVE)
    assert planned(plan, BALANCED) == planned(plan, BALANCED)


@pytest.mark.parametrize("name", sorted(operators()))
def test_every_task_is_enqueued_after_what_it_needs(name):
    operation = operators()[name].operation
    if not hasattr(operation, "of") or name == "matmul_beside":
        pytest.skip("has no sizes of its own, or strategies instead of schedules")
    made = operation.of(96, 24, 32, 3, "float32")
    for schedule in Schedule.space(made):
        plan = planned(made.lower(schedule), BALANCED)
        order = issue_order(plan)
        check_issue_order(plan, order)
        # With one hardware queue per rank the plan still ends: whatever heads a queue can run.
        _run_in_one_queue_per_rank(plan, order)


def _run_in_one_queue_per_rank(plan, order):
    queues = {rank: [t for t in order if plan.tasks[t].rank == rank] for rank in range(3)}
    done: set[int] = set()
    while any(queues.values()):
        ready = [
            rank
            for rank, queue in queues.items()
            if queue and all(other in done for other in plan.tasks[queue[0]].after)
        ]
        assert ready, "the heads of all queues wait"
        done.add(queues[random.Random(len(done)).choice(ready)].pop(0))


def test_a_wrong_order_is_refused():
    plan = AllGatherMatmul((64,) * 2, ((8,),) * 2, 8).lower(Schedule.parse("hetero-unfused-1d"))
    order = issue_order(plan)
    with pytest.raises(InvalidPlan, match="which it needs"):
        check_issue_order(plan, order[::-1])
    with pytest.raises(InvalidPlan, match="every task"):
        check_issue_order(plan, order[1:])
    second = next(task for task in plan.tasks if task.after)
    tasks = list(plan.tasks)
    tasks[second.after[0]] = replace(tasks[second.after[0]], after=(second.id,))
    with pytest.raises(InvalidPlan, match="cycle"):
        issue_order(replace(plan, tasks=tuple(tasks)))
