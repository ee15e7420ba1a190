"""Random sequences of calls: shapes, dtypes, schedules, overlapping groups, delays; all exact, and
memory flat. WEFT_TEST_CALLS scales the number of calls (10,000 in all by default)."""

from __future__ import annotations

import gc
import os
import random
import threading
import time

import pytest
import torch
import torch.distributed as dist
from ranks import check_call, integers, product, shard_of

import weft
from weft import fabric
from weft.plan.all_gather_matmul import AllGatherMatmul

NUM_CALLS = int(os.environ.get("WEFT_TEST_CALLS", "10000"))
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SIZES = (0, 1, 2, 3, 5, 8, 13, 24, 40)


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def random_calls(count: int, seed: int, members: list[list[int]], delays: bool) -> None:
    """The same random calls on every rank, each on a random group, with delays of the rank's own.

    Nine in ten calls are one of sixty kinds, so that warm and cold plans are both met."""
    rank = dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in members]
    shared, own = random.Random(seed), random.Random(seed * 1000 + rank)
    kinds = [_kind(shared) for _ in range(60)]
    inputs: dict = {}
    middle: tuple[int, int] | None = None
    for number in range(count):
        at = shared.randrange(len(groups))
        kind = kinds[shared.randrange(60)] if shared.random() < 0.9 else _kind(shared)
        (m, ns, k, dtype, gathered), choice = kind, shared.random()
        if rank not in members[at]:
            continue
        group, world = groups[at], len(members[at])
        space = _space(world)
        schedule = space[int(choice * len(space))]
        version = shared.randrange(2) if len(members) == 1 else number % 2
        key = (m, ns, k, dtype, version)
        if key not in inputs:
            if len(inputs) > 200:
                inputs.clear()
            x = integers((m, k), dtype, version)
            ws = [integers((k, n), dtype, version + i) for i, n in enumerate(ns)]
            inputs[key] = x, ws, [product(x, w) for w in ws]
        x, ws, expected = inputs[key]
        shard = shard_of(x, group)
        symmetric = own.random() < 0.3
        if symmetric:
            here = weft.symmetric_empty(*shard.shape, dtype=dtype, group=group)
            here.copy_(shard)
            shard = here
        if delays and own.random() < 0.05:
            time.sleep(own.random() * 0.004)
        ys = weft.all_gather_matmul(
            shard, ws, group=group, schedule=schedule, return_gathered=gathered
        )
        if symmetric:
            shard.fill_(torch.nan)
        if gathered:
            ys, whole = ys
            assert torch.equal(whole, x), (number, kind, schedule)
        for y, right in zip(ys, expected, strict=True):
            assert torch.equal(y, right), (number, kind, schedule)
        if middle is None and number >= count // 2:
            middle = _memory(groups, members)
    if middle is not None:
        after = _memory(groups, members)
        assert after[0] <= middle[0] + 2**20, "the heap is flat"
        assert after[1] <= middle[1] + 24 * 2**20, "resident memory is flat"
    for group, ranks in zip(groups, members, strict=True):
        if rank in ranks:
            dist.destroy_process_group(group)


def _kind(choice: random.Random) -> tuple:
    ns = tuple(choice.choice((0, 1, 3, 8)) for _ in range(choice.choice((1, 1, 1, 2))))
    m, k = choice.choice(SIZES), choice.choice(SIZES[:7])
    return (m, ns, k, choice.choice(DTYPES), choice.random() < 0.2)


_spaces: dict[int, list[weft.Schedule]] = {}


def _space(world: int) -> list[weft.Schedule]:
    if world not in _spaces:
        _spaces[world] = weft.Schedule.space(AllGatherMatmul.of(1, 1, 1, world))
    return _spaces[world]


def _memory(groups: list, members: list[list[int]]) -> tuple[int, int]:
    gc.collect()
    rank = dist.get_rank()
    heap = sum(
        fabric.of(g).memory.allocated
        for g, ranks in zip(groups, members, strict=True)
        if rank in ranks
    )
    return heap, resident()


@pytest.mark.parametrize(
    ("world", "members", "share"),
    [
        (2, [[0, 1]], 0.6),
        (3, [[0, 1], [1, 2], [0, 1, 2]], 0.3),
        (4, [[0, 1, 2, 3], [0, 2], [3, 1]], 0.1),
    ],
    ids=["two ranks", "overlapping groups", "four ranks"],
)
def test_random_calls(fresh_ranks, world, members, share):
    count = max(1, int(NUM_CALLS * share))
    fresh_ranks(world).run(random_calls, count, 7, members, True, within=600)


def many_shapes(count: int) -> None:
    """Every call has a shape that was never seen before: what is kept of them must have an end."""
    gc.collect()
    sizes = []
    for number in range(count):
        check_call(1 + number, 1, 1, schedule="adaptive@direct")
        if number in (count // 2, count - 1):
            gc.collect()
            sizes.append(resident())
    assert sizes[1] - sizes[0] < 24 * 2**20


def test_shapes_that_never_repeat(fresh_ranks):
    fresh_ranks(2).run(many_shapes, 1200)


def two_threads(calls: int) -> None:
    """Each thread calls on a group of its own, at the same time as the other."""
    groups = [dist.new_group(), dist.new_group()]
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            choice = random.Random(number)
            for turn in range(calls):
                m, k = choice.choice(SIZES), choice.choice(SIZES)
                name = choice.choice(("adaptive@dma", "serial@cores", "adaptive@direct"))
                check_call(m, 3, min(k, 13), seed=turn, group=groups[number], schedule=name)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_two_threads_on_two_groups(ranks):
    ranks(2).run(two_threads, 150)


def without_barriers(count: int) -> None:
    """Back-to-back calls of different shapes never see each other's data, however far a rank is
    ahead: one rank is slow in one half of them, the other in the other half."""
    rank = dist.get_rank()
    for number in range(count):
        if (number < count // 2) == (rank == 0) and number % 7 == 0:
            time.sleep(0.002)
        rows = 1 + number % 5
        x = torch.full((2 * rows, 6), float(number % 50))
        y = weft.all_gather_matmul(shard_of(x), torch.ones(6, 2), schedule="adaptive@dma")
        assert (y == 6 * (number % 50)).all()


def test_back_to_back_calls(ranks):
    ranks(2).run(without_barriers, 600)


def opened_crosswise() -> None:
    """Every rank opens two groups in two threads, each rank the other one first."""
    groups, rank = [dist.new_group(), dist.new_group()], dist.get_rank()
    thread = threading.Thread(target=fabric.of, args=(groups[rank],))
    thread.start()
    time.sleep(0.3)  # it waits for its peer by now
    fabric.of(groups[1 - rank])
    thread.join()


def test_groups_are_opened_in_any_order(ranks):
    ranks(2).run(opened_crosswise)
