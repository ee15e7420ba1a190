"""Command variants of copy engines: proved plans that give the right values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from weft.errors import InvalidPlan, Unsupported
from weft.plan.collective import KINDS, UNROOTED, Collective
from weft.plan.command_variants import COMMANDS, CommandedCollective, Variant
from weft.plan.interpret import interpret
from weft.plan.tasks import Copy
from weft.plan.verify import verify

VARIANTS = [
    (kind, Variant(command, prelaunch))
    for kind, commands in COMMANDS.items()
    for command in commands
    for prelaunch in (False, True)
]


@pytest.mark.parametrize(("kind", "variant"), VARIANTS, ids=[f"{k}-{v}" for k, v in VARIANTS])
def test_every_variant_is_proved_and_right(kind, variant):
    for world in (1, 2, 3, 5, 8):
        operation = Collective.even(kind, (7 * world if kind == "all_to_all" else 19) * 12, world)
        plan = CommandedCollective(operation, variant, 3).lower()
        verify(plan)
        random = np.random.default_rng(world)
        inputs = {
            (b.rank, b.name): random.integers(-3, 4, (b.rows, b.columns)).astype(float)
            for b in plan.buffers
            if b.kind in ("input", "inplace")
        }
        results = interpret(plan, inputs, seed=world)
        for rank in range(world):
            expected = wanted(operation, inputs, rank)
            if expected is not None:
                assert np.array_equal(results[rank, "y"], expected)


def wanted(operation, inputs, rank):
    rows, world, kind = operation.sizes, operation.world, operation.kind
    cuts = np.cumsum(rows)[:-1]
    if kind == "all_gather":
        return np.concatenate([np.split(inputs[p, "y"], cuts)[p] for p in range(world)])
    if kind == "broadcast":
        return inputs[0, "y"]
    if kind == "gather":
        return np.concatenate([inputs[p, "x"] for p in range(world)]) if rank == 0 else None
    if kind == "scatter":
        return np.split(inputs[0, "x"], cuts)[rank]
    if kind == "all_to_all":
        name = "x" if (0, "x") in inputs else "y"
        sent = [np.cumsum(rows[s * world : (s + 1) * world])[:-1] for s in range(world)]
        return np.concatenate([np.split(inputs[s, name], sent[s])[rank] for s in range(world)])
    total = sum(inputs[p, "x"] for p in range(world))
    return total if kind == "all_reduce" else np.split(total, cuts)[rank]


@pytest.mark.parametrize(("kind", "variant"), VARIANTS, ids=[f"{k}-{v}" for k, v in VARIANTS])
def test_plans_move_the_bytes_of_the_operation(kind, variant):
    operation = Collective.even(kind, 8 * 4 * 35, 8, root=3 if KINDS[kind].rooted else 0)
    plan = CommandedCollective(operation, variant).lower()
    moved = {}
    for task in plan.tasks:
        for source, target in zip(task.reads(), task.writes(), strict=False):
            if isinstance(task, Copy) and source.rank != target.rank:
                key = (source.rank, target.rank)
                moved[key] = moved.get(key, 0) + plan.num_bytes(source)
    for source in range(8):
        for target in range(8):
            assert moved.get((source, target), 0) == operation.num_bytes(source, target)


def test_a_block_in_the_wrong_place_is_found():
    operation = Collective.even("all_gather", 4096, 4)
    plan = CommandedCollective(operation, Variant("pcpy")).lower()
    one, two = [task for task in plan.tasks if task.rank == 0][:2]
    crossed = {one.id: replace(one, target=two.target), two.id: replace(two, target=one.target)}
    tasks = tuple(crossed.get(task.id, task) for task in plan.tasks)
    with pytest.raises(InvalidPlan):
        verify(replace(plan, tasks=tasks))


def test_sizes_are_as_libraries_count_them():
    for kind in KINDS:
        operation = Collective.even(kind, 4096, 8)
        assert operation.total_bytes == 4096
    sent = {
        kind: sum(Collective.even(kind, 8 << 20, 8).num_bytes(0, peer) for peer in range(8)) >> 20
        for kind in UNROOTED
    }
    assert sent == {"all_gather": 7, "all_to_all": 7, "reduce_scatter": 7, "all_reduce": 14}
    assert Collective.even("barrier", 0, 4).num_bytes(0, 1) == 0


def test_what_cannot_be_is_refused():
    with pytest.raises(Unsupported, match="cannot be made of swap"):
        CommandedCollective(Collective.even("all_gather", 4096, 2), Variant("swap"))
    with pytest.raises(Unsupported, match="as many elements to a peer"):
        CommandedCollective(Collective("all_to_all", (1, 2, 3, 4), 2), Variant("swap"))
    with pytest.raises(Unsupported, match="no commands for barrier"):
        CommandedCollective(Collective.even("barrier", 0, 2), Variant("pcpy"))
    with pytest.raises(Unsupported, match="into 0 chunks"):
        CommandedCollective(Collective.even("all_reduce", 4096, 2), Variant("pcpy"), 0)
    with pytest.raises(Unsupported, match="did you mean all_gather"):
        Collective.even("all_gathr", 4096, 2)
    with pytest.raises(Unsupported, match="takes 4 sizes"):
        Collective("all_to_all", (1, 2), 2)
    with pytest.raises(Unsupported, match="no rank 2 in a world of 2"):
        Collective("broadcast", (1, 1), 2, root=2)
