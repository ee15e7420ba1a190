"""Large collectives on several threads: the same bits with any number of them, beside compute, from
a second thread, and where threads outnumber cores."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

import weft

COUNT = 600_011
"""Elements: more than 1 MiB, and no whole number of lines."""


def every_collective(x: torch.Tensor) -> list[torch.Tensor]:
    world = dist.get_world_size()
    even = x[: len(x) // world * world]
    both = x.clone()
    weft.all_reduce(both, out=both)
    return [
        weft.all_gather(x),
        weft.all_reduce(x),
        both,
        weft.all_reduce(x, "max"),
        weft.reduce_scatter(even),
        weft.all_to_all(even),
        weft.broadcast(x, world - 1),
        weft.all_reduce(x, async_op=True).wait(),
    ]


def same_bits(dtype: torch.dtype) -> list[str]:
    """What differs between one, two, three and four threads."""
    make = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(COUNT, generator=make).to(dtype)
    before, differs = torch.get_num_threads(), []
    try:
        torch.set_num_threads(1)
        wanted = every_collective(x)
        for threads in (2, 3, 4):
            torch.set_num_threads(threads)
            for at, found in enumerate(every_collective(x)):
                if not torch.equal(found, wanted[at]):
                    differs.append(f"collective {at} with {threads} threads")
    finally:
        torch.set_num_threads(before)
    return differs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_number_of_threads_has_the_same_bits(ranks, world, dtype):
    assert ranks(world).run(same_bits, dtype) == [[]] * world


def different_threads() -> bool:
    """Ranks need not have as many threads as each other."""
    rank, world = dist.get_rank(), dist.get_world_size()
    before = torch.get_num_threads()
    torch.set_num_threads(1 + rank)
    try:
        found = weft.all_reduce(torch.full((COUNT,), float(rank + 1)))
    finally:
        torch.set_num_threads(before)
    return bool((found == world * (world + 1) / 2).all())


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_may_have_different_numbers_of_threads(ranks, world):
    assert ranks(world).run(different_threads) == [True] * world


def from_another_thread() -> bool:
    """A collective of a second thread, while the first one computes on all of its threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    found: list[torch.Tensor] = []
    caller = threading.Thread(target=lambda: found.append(weft.all_reduce(torch.ones(COUNT))))
    try:
        caller.start()
        product = torch.ones(300, 300) @ torch.ones(300, 300)
        caller.join()
    finally:
        torch.set_num_threads(before)
    return bool((found[0] == dist.get_world_size()).all() and (product == 300).all())


def test_a_second_thread_may_call(ranks):
    assert ranks(2).run(from_another_thread) == [True] * 2
