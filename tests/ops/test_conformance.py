"""Every operator equals plain torch on every fabric: results, gradients, dtypes, order, refusals.

`operators.py` has the operators, `fabrics.py` the fabrics; a new entry there is tested here."""

from __future__ import annotations

import pytest
import torch
from conformance import (
    backward,
    delayed_runs,
    forward,
    given_outputs,
    gradcheck,
    on_link,
    opcheck,
    refused,
    refused_splits,
    sequence,
    shapes,
    there_and_back,
)
from fabrics import FABRICS
from operator_entry import DTYPES
from operators import OPERATORS

import weft
from weft.ops.operator import operators

MATMULS = [name for name in OPERATORS if "matmul" in name]
SUMS = ["matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_to_all"]
EXAMPLES = [(name, example) for name in OPERATORS for example in OPERATORS[name].examples]
SEVERAL = ("serial", "shard-p2p", "uniform-fused-1d", "hetero-unfused-2d@cores", "adaptive")
"""Schedules of every kind."""

GRAPHS = [(name, example) for name, example in EXAMPLES if OPERATORS[name].graph is not None]
GRAPHS.remove(("matmul_reduce_scatter", "stated rows"))  # graphs must know those of every rank


def worlds(most: int = 8, least: int = 1, only: tuple[int, ...] = ()):
    """Every fabric with each of its worlds, of those that are asked for."""
    return pytest.mark.parametrize(
        ("fabric", "world"),
        [
            pytest.param(fabric, world, id=f"{name}-{world}")
            for name, fabric in FABRICS.items()
            for world in fabric.worlds
            if least <= world <= most and (not only or world in only)
        ],
    )


@pytest.fixture
def run(pools, fabric, world):
    """Runs a function on all ranks of the fabric."""
    return fabric.pool(pools, world).run


def few(fabric, name) -> list[str]:
    return fabric.able(OPERATORS[name].few)


def test_every_operator_is_here():
    registered = {name for name in operators() if name in weft.__all__}
    scaled = {name for name in registered if "scaled" in name}  # in test_scaled.py
    assert registered - scaled == set(OPERATORS)


# -- results ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPERATORS)
@worlds(most=4)
def test_every_schedule_equals_plain_torch(run, fabric, world, name):
    schedules = fabric.able(OPERATORS[name].schedules(world))
    seeds = range(2) if world == 4 else range(3)
    run(forward, name, schedules, fabric.some(seeds) if fabric.in_place else seeds[:2])


@pytest.mark.parametrize("name", [name for name in OPERATORS if OPERATORS[name].shapes])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@worlds(most=3)
def test_every_schedule_on_odd_shapes(run, fabric, world, name, dtype):
    operator = OPERATORS[name]
    schedules = [*operator.schedules(world), *(operator.more if world > 1 else ["adaptive"])]
    run(shapes, name, fabric.able(schedules if fabric.in_place else operator.more), dtype)


@pytest.mark.parametrize("name", [name for name in OPERATORS if OPERATORS[name].shapes])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_schedule_on_odd_shapes_of_four_ranks(ranks, name, dtype):
    operator = OPERATORS[name]
    ranks(4).run(shapes, name, [*operator.schedules(4), *operator.more], dtype)


@pytest.mark.parametrize("name", OPERATORS)
@worlds(least=5)
def test_many_ranks(run, fabric, world, name):
    dtypes = OPERATORS[name].dtypes
    run(forward, name, few(fabric, name)[-2:], (world,), [dtypes[world % len(dtypes)]])


def test_eight_ranks(ranks):
    for name, dtypes in (("all_gather_matmul", DTYPES[:3:2]), ("matmul_all_reduce", DTYPES[:1])):
        ranks(8).run(forward, name, SEVERAL, (0,), dtypes, shape=(13, 3, 5))
        ranks(8).run(forward, name, SEVERAL, (0,), dtypes, shape=(40, 3, 9))
        ranks(8).run(forward, name, ["adaptive@direct"], (0,), shape=(5, 3, 5))


@pytest.mark.parametrize("name", MATMULS)
@worlds(only=(2,))
def test_larger(run, fabric, name):
    """Sizes at which BLAS takes other paths, and copies more than one piece of a link's turn."""
    schedules = ("adaptive@dma", "adaptive@direct", "hetero-fused-1d@dma", "serial@cores")
    # Halves of sums are rounded on the way, so that they are not those of plain torch.
    dtypes = (DTYPES[0], DTYPES[2]) if name == "all_gather_matmul" else DTYPES[:1]
    drawn = {"shape": (257, 129, 96), "sizes": (31, 64, 101)}
    run(forward, name, fabric.able(schedules), (0,), dtypes, **drawn)


@pytest.mark.parametrize("name", OPERATORS)
@worlds(only=(2, 3))
def test_every_dtype(run, fabric, name):
    run(forward, name, few(fabric, name), (7, 8), OPERATORS[name].dtypes)


@pytest.mark.parametrize(("name", "example"), [pair for pair in EXAMPLES if pair[1] != "plain"])
@worlds(only=(2, 3, 4))
def test_every_example(run, fabric, world, name, example):
    """Several weights, three dimensions, sizes that are stated, sizes of a rank's own."""
    schedules = OPERATORS[name].schedules(world) if fabric.name == "host" and world == 3 else ()
    schedules = fabric.able(schedules) or few(fabric, name)
    run(forward, name, schedules, (1, 4), example=example)


@pytest.mark.parametrize("name", OPERATORS)
@worlds(only=(2, 3))
def test_nothing_at_all(run, fabric, name):
    for example in OPERATORS[name].examples:
        run(forward, name, few(fabric, name), (1,), OPERATORS[name].dtypes[:1], example, sizes=(0,))


@pytest.mark.parametrize("name", OPERATORS)
@worlds(only=(2, 3))
def test_given_outputs(run, fabric, name):
    run(given_outputs, name, few(fabric, name))


def test_there_and_back(ranks):
    ranks(2).run(there_and_back)


@pytest.mark.parametrize("name", MATMULS)
def test_many_chunks_on_a_paced_link(ranks, name):
    ranks(2).run(on_link, "0.2GB/s", name, ("adaptive@dma", "hetero-fused-1d@dma"))


# -- gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPERATORS)
@worlds(only=(2, 3, 4))
def test_gradients_equal_plain_torch(run, fabric, world, name):
    schedules = fabric.able(OPERATORS[name].schedules(world)) if world == 2 else few(fabric, name)
    run(backward, name, schedules, fabric.some((1, 2)))


@pytest.mark.parametrize(("name", "example"), EXAMPLES)
@worlds(only=(3,))
def test_gradients_of_every_example(run, fabric, name, example):
    run(backward, name, few(fabric, name)[:2], (1, 4), example=example)


@pytest.mark.parametrize("name", OPERATORS)
@worlds(only=(2,))
def test_gradients_of_every_dtype(run, fabric, name):
    dtypes = OPERATORS[name].dtypes
    run(backward, name, few(fabric, name)[:2], (1, 2, 3), dtypes, sizes=(0, 1, 2, 5, 8))


@pytest.mark.parametrize("name", MATMULS)
@worlds(only=(2,))
def test_gradcheck(run, fabric, name):
    for schedule in ("adaptive@dma", "adaptive@direct") if fabric.in_place else ("auto",):
        run(gradcheck, name, schedule, 3)


@pytest.mark.parametrize("name", MATMULS)
def test_gradcheck_on_three_ranks(ranks, name):
    ranks(3).run(gradcheck, name, "serial@dma", 3)


@pytest.mark.parametrize("name", ["all_gather_matmul", "matmul_all_to_all"])
def test_gradcheck_on_four_ranks(ranks, name):
    ranks(4).run(gradcheck, name, "auto", 5)


# -- order -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SUMS)
@worlds(only=(3,))
def test_reruns_with_delays_are_bit_equal(run, fabric, name):
    for schedule in fabric.able(("adaptive@dma", "adaptive:5@direct", "hetero-unfused-2d@dma")):
        run(delayed_runs, name, schedule)


@pytest.mark.parametrize("seed", [1, 2])
@worlds(only=(4,))
def test_random_sequences_on_two_overlapping_groups(run, fabric, seed):
    run(sequence, seed, 60, {name: few(fabric, name) for name in OPERATORS})


# -- graphs and refusals ---------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "example"), GRAPHS)
def test_opcheck(ranks, name, example):
    ranks(2).run(opcheck, name, example)


@pytest.mark.parametrize("name", MATMULS)
@pytest.mark.parametrize("change", ["integers", "inner", "tensor", "dtype", "out", "schedule"])
@worlds(only=(2,))
def test_bad_input_of_one_rank_is_one_sentence_on_all(run, name, change):
    messages = run(refused, name, change)
    assert messages[0]
    assert all("\n" not in message for message in messages)
    assert all(messages) or change == "out"


@pytest.mark.parametrize("name", [name for name in MATMULS if "all_to_all" in name])
@pytest.mark.parametrize("kind", ["sum", "disagree", "length", "negative", "type"])
@worlds(only=(2,))
def test_bad_splits(run, name, kind):
    messages = run(refused_splits, name, kind)
    assert all("split" in message and "\n" not in message for message in messages)


@pytest.mark.parametrize("name", MATMULS)
def test_no_process_group(name):
    x, w = torch.ones(2, 3), torch.ones(3, 2)
    splits = [[2], [2]] if "all_to_all" in name else []
    for tensor in (x, x.clone().requires_grad_()):
        with pytest.raises(weft.Unsupported, match="no process group"):
            getattr(weft, name)(tensor, w, *splits)
