"""Stream programs have nothing to spare: each wait, post, join and hold that is left out
is reported by the detector, or stops the call.

`make test` takes a seeded sample of the mutants; WEFT_TEST_MUTANTS=all takes all of them."""

from __future__ import annotations

import os
import random
from collections import Counter

import mutants
import pytest

ALL = os.environ.get("WEFT_TEST_MUTANTS", "") == "all"
SAMPLE = 3
"""Mutants of each program in `make test`, besides one of its posts in some programs."""

SCHEDULES = (
    "serial@dma",
    "hetero-unfused-1d@dma",
    "uniform-fused-1d",
    "adaptive@dma",
    "adaptive@direct",
    "uniform-fused-2d",
    "hetero-fused-1d@cores",
    "shard-p2p",
)
LOOKUPS = ("serial@dma", "hetero-unfused-1d@dma", "uniform-fused-1d", "hetero-fused-1d@cores")
PROGRAMS = {
    name: LOOKUPS if name == "embedding_all_to_all" else SCHEDULES
    for name in (
        "all_gather_matmul",
        "matmul_reduce_scatter",
        "matmul_all_reduce",
        "all_to_all_matmul",
        "matmul_all_to_all",
        "embedding_all_to_all",
        mutants.ONE_WAY,
    )
}


def seen(ranks, name, schedule, mutant, on_rank, captured=False) -> bool:
    """Whether the detector reports a mutant, or its call stands still."""
    from weft.loom import find

    if mutant.kind in mutants.POSTS:
        return any(ranks.pool.run(mutants.stalls, name, schedule, mutant, on_rank))
    ranks.pool.run(mutants.run, name, schedule, mutant, on_rank, captured=captured)
    return bool(find(ranks.session.logs()))


def check(ranks, name, schedule, chosen, captured=False) -> Counter:
    """That the program as it is has no finding, and the chosen of its mutants have."""
    from weft.loom import find

    own = ranks.pool.run(mutants.listed, name, schedule, captured)
    assert all(ranks.pool.run(mutants.run, name, schedule, captured=captured))
    assert find(ranks.session.logs()) == []
    found = [(rank, mutant) for rank, some in enumerate(own) for mutant in some]
    tried: Counter = Counter()
    for rank, mutant in chosen(found):
        about = f"{name}, {schedule}: rank {rank} without {mutant} was not found"
        assert seen(ranks, name, schedule, mutant, rank, captured), about
        tried[mutant.kind] += 1
    return tried


def sample(seed):
    """Some of the mutants, of as many kinds as possible; posts take long, and are in few."""
    choose = random.Random(seed)

    def chosen(found):
        kinds = sorted({mutant.kind for _, mutant in found} - set(mutants.POSTS))
        choose.shuffle(kinds)
        some = [choose.choice([m for m in found if m[1].kind == kind]) for kind in kinds[:SAMPLE]]
        posts = [m for m in found if m[1].kind in mutants.POSTS]
        return some + ([choose.choice(posts)] if posts and choose.random() < 0.2 else [])

    return chosen


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("world", [2, 3])
def test_what_is_left_out_is_found(loom, world, name):
    ranks = loom(world)
    tried: Counter = Counter()
    schedules = PROGRAMS[name]
    if not ALL:  # each is met with one of the worlds
        schedules = schedules[world % 2 :: 2]
    for number, schedule in enumerate(schedules):
        chosen = (lambda found: found) if ALL else sample(f"{name} {world} {number}")
        tried += check(ranks, name, schedule, chosen)
    print(f"\n{name}, {world} ranks: {dict(tried)}")
    assert tried


@pytest.mark.parametrize("name", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_what_is_left_out_of_a_captured_call_is_found(loom, name):
    """Captured calls also meet their peers twice, and reset the words that they wait for.

    The words of a reduce-scatter order its own replays too, so that either of its meetings can be
    spared unless it follows a call of another kind, as in `test_two_calls_in_one_graph`."""
    ranks = loom(3 if ALL else 2, deadline=6)
    for number, schedule in enumerate(("adaptive@dma", "uniform-fused-1d")):
        pick = (lambda found: found) if ALL else sample(f"captured {name} {number}")
        both = name.startswith("all_")

        def chosen(found, both=both, pick=pick):
            return pick([m for m in found if both or (m[1].kind != "meet" and m[1].at >= 0)])

        tried = check(ranks, name, schedule, chosen, captured=True)
        print(f"\n{name} captured, {schedule}: {dict(tried)}")


@pytest.mark.parametrize("world", [2, 3])
def test_the_entry_of_a_peer_that_sends_nothing_is_waited_for(loom, world):
    """Otherwise a rank that reads nothing would write over what its peers still read."""
    ranks = loom(world)

    def chosen(found):
        return [m for m in found if m[1].kind == "entry"]

    tried = check(ranks, mutants.ONE_WAY, "adaptive@dma", chosen)
    assert tried["entry"] == world - 1
