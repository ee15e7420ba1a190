"""The fused kernels on several threads: the same bits with any number of them, and none after a
fork."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

import weft
from weft.fabric import _native


def with_threads(count, function):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return function()
    finally:
        torch.set_num_threads(before)


def same_bits() -> list[str]:
    """What differs between one, two, three and four threads."""
    rank, differs = dist.get_rank(), []
    make = torch.Generator().manual_seed(rank)

    def compare(what, function):
        for _ in range(3):  # a weight that comes again is packed, which is another order of sums
            one = with_threads(1, function)
        for threads in (2, 3, 4):
            if not torch.equal(with_threads(threads, function), one):
                differs.append(f"{what} with {threads} threads")

    # Weights of several parts (of 128 KiB), with columns that are left over.
    for m, k, n, dtype in (
        (1, 1024, 500, torch.float32),
        (7, 700, 1000, torch.bfloat16),
        (3, 257, 1537, torch.float16),
    ):
        x = torch.randn(m, k, generator=make).to(dtype)
        w = torch.randn(n, k, generator=make).to(dtype)
        for name, weight in (("w", w.t().contiguous()), ("w.t()", w.t())):
            compare(
                f"{m}x{n}x{k} {name}",
                lambda x=x, weight=weight: weft.matmul_all_reduce(x, weight, schedule="in-kernel"),
            )
    world, bags = dist.get_world_size(), 500
    table = torch.randn(1000, 96, generator=make)
    index = torch.randint(1000, (bags * 7,), generator=make)
    offset = torch.arange(0, bags * 7, 7)
    for schedule in ("in-kernel", "serial@dma"):
        compare(
            f"lookups {schedule}",
            lambda schedule=schedule: weft.embedding_all_to_all(
                [table], [index], [offset[: bags // world * world]], schedule=schedule
            ),
        )
    weight = torch.randn(len(index), generator=make)
    for dtype, mode in ((torch.float32, "sum"), (torch.bfloat16, "sum"), (torch.float32, "mean")):
        wanted = table.to(dtype).requires_grad_()
        y = weft.embedding_all_to_all(
            [wanted],
            [index],
            [offset[: bags // world * world]],
            mode=mode,
            per_sample_weights=[weight.to(dtype)] if mode == "sum" else None,
        )
        dy = torch.randn(y.shape, generator=make).to(dtype)
        compare(
            f"gradient {dtype} {mode}",
            lambda y=y, wanted=wanted, dy=dy: torch.autograd.grad(y, wanted, dy, retain_graph=True)[
                0
            ],
        )
    return differs


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_number_of_threads_has_the_same_bits(ranks, world):
    assert ranks(world).run(same_bits) == [[]] * world


def in_a_child() -> int:
    """A child of a process whose threads were used multiplies as well, by itself."""

    def product():
        x, w, y = torch.ones(1, 4096), torch.ones(4096, 200), torch.empty(1, 200)
        _native.multiply(
            x.data_ptr(), 1, w.data_ptr(), 0, False, 800, 4096, 0, 200, y.data_ptr(), 4
        )
        return bool((y == 4096).all())

    assert _native.has_team()
    assert product()
    child = os.fork()
    if child == 0:
        os._exit(0 if product() and not _native.has_team() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_has_no_team(ranks):
    assert ranks(1).run(in_a_child) == [0]
