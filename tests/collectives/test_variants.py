"""Command variants: proved plans, the right values, and times that agree with the closed form."""

from __future__ import annotations

import numpy as np
import pytest

from weft.collectives.variants import best, plan_of, simulated_seconds
from weft.errors import Unsupported
from weft.machine import load
from weft.plan.collective import COMMANDS, Collective, Variant, lower
from weft.plan.interpret import interpret
from weft.simulate.cost.collective import dma_variants

VARIANTS = [
    (kind, Variant(command, prelaunch))
    for kind, commands in COMMANDS.items()
    for command in commands
    for prelaunch in (False, True)
]


@pytest.mark.parametrize(("kind", "variant"), VARIANTS, ids=[f"{k}-{v}" for k, v in VARIANTS])
def test_every_variant_is_proved_and_right(kind, variant):
    for world in (1, 2, 3, 5, 8):
        operation = Collective.even(kind, (7 * world if kind == "all_to_all" else 19) * 12, world,
                                    columns=3)  # fmt: skip
        plan = plan_of(operation, variant, 3)
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
    rows, world, kind = operation.rows, operation.world, operation.kind
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


@pytest.mark.parametrize("kind", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("kib", [32, 512, 4096, 65536, 2**20])
def test_simulated_times_agree_with_the_closed_form(kind, kib):
    machine = load("mi300x")
    operation = Collective.even(kind, kib * 1024, 8)
    for (command, prelaunch), seconds in dma_variants(machine, kind, kib * 1024, 8).items():
        simulated = simulated_seconds(plan_of(operation, Variant(command, prelaunch)), machine)
        assert simulated == pytest.approx(seconds, rel=0.15)


def test_the_best_variant_grows_with_the_size():
    """As published: b2b for small messages, bcst or swap between, pcpy for large ones."""
    machine = load("mi300x")
    gathers = [str(best(machine, "all_gather", kib * 1024, 8)) for kib in (64, 512, 4096, 65536)]
    assert gathers == ["b2b+prelaunch", "bcst+prelaunch", "pcpy+prelaunch", "pcpy+prelaunch"]
    exchanges = [str(best(machine, "all_to_all", kib * 1024, 8)) for kib in (8, 1024, 65536)]
    assert exchanges[1:] == ["swap+prelaunch", "pcpy+prelaunch"]
    assert best(machine, "all_reduce", 2**16, 8).command in COMMANDS["all_reduce"]


def test_chunks_let_sums_overlap_copies():
    machine = load("mi300x")
    operation = Collective.even("all_reduce", 2**26, 8)
    times = [
        simulated_seconds(plan_of(operation, Variant("pcpy", True), chunks), machine)
        for chunks in (1, 4)
    ]
    assert times[1] < 0.95 * times[0]


def test_what_cannot_be_is_refused():
    with pytest.raises(Unsupported, match="cannot be made of swap"):
        lower(Collective.even("all_gather", 4096, 2), Variant("swap"))
    with pytest.raises(Unsupported, match="as many rows to a peer"):
        lower(Collective("all_to_all", (1, 2, 3, 4), 2, 2), Variant("swap"))
    with pytest.raises(Unsupported, match="did you mean pcpy"):
        Variant.parse("pcpi")
    assert Variant.parse("b2b+prelaunch") == Variant("b2b", True)
