"""`verify` refuses a broken plan of every kind, with the reason; mutations of right plans too."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from weft import InvalidPlan, Schedule
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.plan.interpret import interpret
from weft.plan.order import ancestors, predecessors, topological
from weft.plan.tasks import Buffer, Copy, Matmul, Permute, Plan
from weft.plan.verify import verify


def lowered(name: str, m: int = 12, n=3, k: int = 6, world: int = 3, **options) -> Plan:
    return AllGatherMatmul.of(m, n, k, world, **options).lower(Schedule.parse(name))


def changed(plan: Plan, number: int, **changes) -> Plan:
    """The plan with one task changed."""
    tasks = list(plan.tasks)
    tasks[number] = replace(tasks[number], **changes)
    return replace(plan, tasks=tuple(tasks))


def without(plan: Plan, number: int) -> Plan:
    """The plan without one task: the rest is numbered anew, and waits for it no more."""
    renumbered = {t.id: t.id - (t.id > number) for t in plan.tasks}
    tasks = tuple(
        replace(t, id=renumbered[t.id], after=tuple(renumbered[o] for o in t.after if o != number))
        for t in plan.tasks
        if t.id != number
    )
    return replace(plan, tasks=tasks)


def first(plan: Plan, kind, rank: int = 0, where=lambda task: True):
    return next(t for t in plan.tasks if isinstance(t, kind) and t.rank == rank and where(t))


def added(plan: Plan, task, **changes) -> Plan:
    """The plan with one more task, a changed copy of one that it has."""
    more = replace(task, id=len(plan.tasks), **changes)
    return replace(plan, tasks=(*plan.tasks, more))


def refused(plan: Plan, *said: str) -> str:
    with pytest.raises(InvalidPlan) as error:
        verify(plan)
    message = str(error.value)
    for words in said:
        assert words in message
    assert "\n" not in message
    return message


# -- one broken plan of each kind ------------------------------------------------------------------


def test_cycle():
    plan = lowered("hetero-unfused-1d")
    pull = first(plan, Copy)
    follower = next(t for t in plan.tasks if pull.id in t.after)
    refused(changed(plan, pull.id, after=(follower.id,)), "cycle", "wait for each other")
    refused(changed(plan, pull.id, after=(pull.id,)), "cycle")


def test_cycle_over_ranks():
    plan = lowered("serial", world=2)
    one, two = first(plan, Copy, 0), first(plan, Copy, 1)
    broken = changed(changed(plan, one.id, after=(two.id,)), two.id, after=(one.id,))
    refused(broken, "cycle", "rank 0", "rank 1")


def test_cycle_through_a_lane():
    """Two tasks of one lane, of which the one ahead waits for the one behind."""
    plan = lowered("hetero-unfused-1d")
    ahead, behind = [t for t in plan.tasks if isinstance(t, Matmul) and t.rank == 0][:2]
    refused(changed(plan, ahead.id, after=(behind.id,)), "cycle")


def test_double_write():
    plan = lowered("hetero-unfused-1d")
    task = first(plan, Matmul)
    refused(added(plan, task), "double write", task.label, "rank 0")


def test_a_term_added_twice():
    plan = lowered("hetero-fused-2d")
    task = first(plan, Matmul, where=lambda t: t.accumulate)
    refused(added(plan, task), "double write", "2 times")


def test_missing_chunk_of_an_output():
    plan = lowered("hetero-unfused-1d")
    task = plan.lanes[(0, "compute")][-1]
    refused(without(plan, task.id), "missing chunk", "y0@0")


def test_missing_chunk_of_a_copy():
    plan = lowered("serial")
    pull = first(plan, Copy)
    refused(without(plan, pull.id), "missing chunk", "nothing has written")


def test_missing_chunk_of_the_gathered_input():
    plan = lowered("adaptive@direct", gathered=True)
    refused(without(plan, first(plan, Copy).id), "missing chunk", "gathered@0")


def test_race_between_copy_and_matmul():
    plan = lowered("serial")
    task = first(plan, Matmul)
    refused(changed(plan, task.id, after=()), "race", "gathered@0")


def test_race_between_two_writers():
    plan = lowered("serial", world=2)
    one = first(plan, Copy, where=lambda t: t.peer != 0)
    two = first(plan, Copy, where=lambda t: t.peer == 0)
    size = min(one.source.rows, two.source.rows)
    clash = two.target._replace(row=one.target.row, rows=size)
    broken = changed(plan, two.id, target=clash, source=two.source._replace(rows=size))
    refused(broken, "race", "may use it")


def test_race_with_a_workspace_that_is_used_again():
    """A step's product is scattered before the next step overwrites it: only the lane says so."""
    plan = lowered("uniform-fused-1d")
    scatter = first(plan, Permute, where=lambda t: t.label.startswith("scatter"))
    onto_an_engine = Copy(
        scatter.id, 0, scatter.after, "stray", scatter.sources[0], scatter.targets[0], "dma", 9
    )
    tasks = list(plan.tasks)
    tasks[scatter.id] = onto_an_engine
    refused(replace(plan, tasks=tuple(tasks)), "race", "product0@0")


def test_a_race_with_another_rank():
    """A rank that may not have written what its peer reads."""
    plan = lowered("adaptive@direct", world=2)
    extra = Buffer("shadow", 1, 6, 6, "workspace", "float32")
    local = Copy(
        len(plan.tasks), 1, (), "shadow", plan.buffer[(1, "x")].all(), extra.all(), "dma", 1
    )
    remote = first(plan, Matmul, where=lambda t: t.a.rank == 1)
    plan = replace(
        changed(plan, remote.id, a=extra.all()),
        buffers=(*plan.buffers, extra),
        workspace=(plan.workspace[0], plan.workspace[1] + extra.num_bytes),
    )
    refused(replace(plan, tasks=(*plan.tasks, local)), "race", "shadow@1")


@pytest.mark.parametrize("lie", [-1, 1, -(10**9)])
def test_workspace_lie(lie):
    plan = lowered("serial")
    promised = (plan.workspace[0] + lie, *plan.workspace[1:])
    refused(replace(plan, workspace=promised), "workspace", "rank 0", "promised")


def test_out_of_bounds():
    plan = lowered("hetero-unfused-1d")
    task = first(plan, Copy)
    for change in ({"row": 1000}, {"row": -1}, {"column": 1}, {"columns": 7}):
        refused(changed(plan, task.id, source=task.source._replace(**change)), "out of bounds")


def test_no_such_buffer():
    plan = lowered("hetero-unfused-1d")
    task = first(plan, Matmul)
    refused(changed(plan, task.id, b=task.b._replace(buffer="w9")), "no such buffer")
    refused(changed(plan, task.id, b=task.b._replace(rank=9)), "no such buffer")


def test_wrong_place_in_the_output():
    plan = lowered("hetero-unfused-1d", world=2)
    pulled = first(plan, Matmul, where=lambda t: t.a.buffer == "gathered")
    local = first(plan, Matmul, where=lambda t: t.a.buffer == "x")
    size = min(pulled.a.rows, local.a.rows)
    swapped = changed(
        changed(
            plan,
            pulled.id,
            a=pulled.a._replace(rows=size),
            c=pulled.c._replace(row=local.c.row, rows=size),
        ),
        local.id,
        a=local.a._replace(rows=size),
        c=local.c._replace(row=pulled.c.row, rows=size),
    )
    refused(swapped, "wrong place")


def test_wrong_place_in_the_gathered_input():
    plan = lowered("adaptive@direct", world=2, gathered=True)
    pulls = [t for t in plan.tasks if isinstance(t, Copy) and t.rank == 0]
    one, two = pulls[0], pulls[1]
    swapped = changed(changed(plan, one.id, target=two.target), two.id, target=one.target)
    refused(swapped, "wrong place")


def test_wrong_weight():
    plan = lowered("hetero-unfused-1d", n=(3, 3))
    task = first(plan, Matmul)
    refused(changed(plan, task.id, b=task.b._replace(buffer="w1")), "y0@0")


def test_columns_that_do_not_meet():
    plan = lowered("uniform-fused-2d", k=6)
    task = first(plan, Matmul, where=lambda t: t.accumulate)
    assert task.b.row > 0
    refused(changed(plan, task.id, b=task.b._replace(row=0)), "multiplies columns")


def test_double_move():
    plan = lowered("hetero-unfused-1d")
    pull = first(plan, Copy)
    extra = Buffer("again", 0, pull.source.rows, pull.source.columns, "workspace", "float32")
    broken = replace(
        added(plan, pull, target=extra.all()),
        buffers=(*plan.buffers, extra),
        workspace=(plan.workspace[0] + extra.num_bytes, *plan.workspace[1:]),
    )
    refused(broken, "double move", "rank 0")


def test_waiting_for_a_task_that_is_not_there():
    plan = lowered("serial")
    for missing in (len(plan.tasks), -1):
        refused(changed(plan, 0, after=(missing,)), "not there")


def test_a_wrong_id():
    refused(changed(lowered("serial"), 1, id=0), "wrong id")


def test_writing_an_input():
    plan = lowered("serial")
    task = first(plan, Copy, where=lambda t: t.peer == 0)
    refused(changed(plan, task.id, target=plan.buffer[(0, "x")].all()), "writes the input")


def test_unequal_shapes():
    plan = lowered("serial")
    copy, matmul = first(plan, Copy), first(plan, Matmul)
    shorter = copy.source._replace(rows=copy.source.rows - 1)
    refused(changed(plan, copy.id, source=shorter), "unequal shape")
    narrower = matmul.b._replace(columns=matmul.b.columns - 1)
    refused(changed(plan, matmul.id, b=narrower), "unequal shape")


def test_multiplying_a_result():
    plan = lowered("serial", n=6)
    task = plan.lanes[(0, "compute")][-1]
    broken = added(plan, task, a=task.c, b=task.b, c=plan.buffer[(0, "gathered")].all())
    refused(broken)


def test_permuting_the_memory_of_another_rank():
    plan = lowered("uniform-fused-1d", world=2, gathered=True)
    task = first(plan, Permute, where=lambda t: t.label.startswith("gather"))
    remote = tuple(r._replace(rank=1) if r.buffer == "x" else r for r in task.sources)
    refused(changed(plan, task.id, sources=remote), "another rank's memory")


# -- mutations: every single task and every single dependency counts -------------------------------

MUTATED = [  # a plan, its number of dependencies, and how many of them the order implies anyway
    ("serial", {}, 9, 0),
    ("shard-p2p", {}, 9, 3),
    ("shard-p2p@direct", {"gathered": True}, 3, 3),
    ("uniform-fused-1d", {}, 36, 9),
    ("uniform-fused-1d", {"gathered": True}, 36, 18),
    ("hetero-fused-1d", {"n": (2, 3)}, 54, 36),
    ("hetero-unfused-1d", {"gathered": True}, 18, 0),
    ("uniform-fused-2d", {}, 27, 0),
    ("hetero-fused-2d", {"dtype": "bfloat16"}, 18, 0),
    ("hetero-unfused-2d", {"n": (2, 1)}, 36, 18),
    ("adaptive", {}, 18, 0),
    ("adaptive:3@cores", {"gathered": True}, 18, 0),
    ("hetero-fused-1d-p2p:2", {}, 27, 21),
]


@pytest.mark.parametrize(("name", "options"), [case[:2] for case in MUTATED])
def test_no_task_can_be_dropped(name, options):
    plan = lowered(name, **options)
    verify(plan)
    for task in plan.tasks:
        refused(without(plan, task.id))


@pytest.mark.parametrize(("name", "options", "num_dependencies", "num_harmless"), MUTATED)
def test_a_dropped_dependency_is_refused_unless_the_order_is_still_there(
    name, options, num_dependencies, num_harmless
):
    """Harmless are only: one that lanes and other dependencies still imply (a scatter behind its
    GEMM, the second w behind the first), and one peer's pull after another's, which is there for
    the links and not for the result."""
    plan = lowered(name, **options)
    dropped = harmless = 0
    for task in plan.tasks:
        for other in task.after:
            dropped += 1
            broken = changed(plan, task.id, after=tuple(o for o in task.after if o != other))
            if _still_ordered(broken, other, task.id) or _only_for_the_links(plan, other, task.id):
                harmless += 1
                verify(broken)
                _check_meaning(broken)
            else:
                refused(broken, "race")
    assert (dropped, harmless) == (num_dependencies, num_harmless)


def _still_ordered(plan: Plan, before: int, after: int) -> bool:
    order = topological(plan, predecessors(plan))
    return bool(ancestors(order, predecessors(plan))[after] >> before & 1)


def _only_for_the_links(plan: Plan, before: int, after: int) -> bool:
    one, two = plan.tasks[before], plan.tasks[after]
    return isinstance(one, Copy) and isinstance(two, Copy) and one.target.key == two.target.key


def _check_meaning(plan: Plan, num_orders: int = 3) -> None:
    values = np.random.default_rng(0)
    inputs = {
        (b.rank, b.name): values.integers(-4, 5, (b.rows, b.columns)).astype(float)
        for b in plan.buffers
        if b.kind == "input"
    }
    x = np.concatenate([inputs[(rank, "x")] for rank in range(plan.operation.world)])
    for seed in range(num_orders):
        for (rank, name), value in interpret(plan, inputs, seed).items():
            expected = x if name == "gathered" else x @ inputs[(rank, f"w{name[1:]}")]
            np.testing.assert_array_equal(value, expected)


def test_the_interpreter_shows_a_race():
    """The meaning of a plan with a race depends on the order: some order gives a wrong result."""
    plan = lowered("serial")
    broken = changed(plan, first(plan, Matmul).id, after=())
    with pytest.raises(AssertionError):
        _check_meaning(broken, num_orders=24)
