"""The kernels, interpreted on rank processes over shared memory, equal plain torch bit for bit."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KERNELS = (
    "embedding_all_to_all",
    "gemv_all_reduce",
    "gemm_all_to_all",
    "all_gather_gemm",
    "all_gather_gemm_claim",
)


def check(name, dtype, options, **case):
    from weft.triton import Host, Tiles
    from weft.triton.checks import CHECKS, KernelCase

    case = {"tiles": Tiles(16, 16, 32), "calls": 1, "grid": 3, **case}
    return CHECKS[name](Host(), KernelCase(dtype, **case), **options)


def check_all(cases):
    return [check(name, dtype, options, **case) for name, dtype, options, case in cases]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_kernel_in_every_dtype(ranks, world):
    dtypes = DTYPES if world == 2 else DTYPES[world - 3 : world - 2]
    calls = 2 if world == 3 else 1
    cases = [(n, dtype, {}, {"seed": world, "calls": calls}) for n in KERNELS for dtype in dtypes]
    assert ranks(world).run(check_all, cases) == [[True] * len(cases)] * world


ODD = [
    ("gemm_all_to_all", {"columns": 1, "inner": 1, "most": 1}),
    ("gemm_all_to_all", {"columns": 17, "inner": 0, "most": 5}),
    ("gemm_all_to_all", {"columns": 0, "inner": 3, "most": 5}),
    ("gemm_all_to_all", {"columns": 33, "inner": 31, "most": 0}),
    ("gemv_all_reduce", {"batch": 1, "columns": 1, "inner": 1}),  # fewer blocks than ranks
    ("gemv_all_reduce", {"batch": 17, "columns": 47, "inner": 0}),
    ("gemv_all_reduce", {"batch": 0, "columns": 5, "inner": 7}),
    ("gemv_all_reduce", {"batch": 2, "columns": 0, "inner": 7}),
    ("all_gather_gemm", {"rows": 1, "columns": 1, "inner": 1}),  # ranks without rows
    ("all_gather_gemm", {"rows": 0, "columns": 3, "inner": 3}),
    ("all_gather_gemm", {"rows": 37, "columns": 3, "inner": 0}),
    ("all_gather_gemm_claim", {"rows": 1, "columns": 1, "inner": 1}),
    ("all_gather_gemm_claim", {"rows": 0, "columns": 3, "inner": 3}),
    ("all_gather_gemm_claim", {"rows": 37, "columns": 0, "inner": 5}),
    ("embedding_all_to_all", {"batch": 1}),
    ("embedding_all_to_all", {"batch": 0}),
    ("embedding_all_to_all", {"widths": ((), ())}),
    ("embedding_all_to_all", {"mode": "mean"}),
    ("embedding_all_to_all", {"weighted": True, "most": 7}),
]


def test_odd_and_empty_sizes(ranks):
    cases = [(name, torch.float32, options, {"calls": 2, "grid": 2}) for name, options in ODD]
    assert ranks(2).run(check_all, cases) == [[True] * len(cases)] * 2


def test_one_rank_alone(ranks):
    cases = [(name, torch.float32, {}, {}) for name in KERNELS]
    assert ranks(1).run(check_all, cases) == [[True] * len(KERNELS)]


@pytest.mark.parametrize("grid", [1, 7])
def test_any_grid(ranks, grid):
    """A single program does all phases alone; many have little or nothing to do."""
    cases = [(name, torch.float32, {}, {"grid": grid}) for name in KERNELS]
    assert ranks(2).run(check_all, cases) == [[True] * len(KERNELS)] * 2


def slow(rank, seed):
    """Makes one rank late: before programs, between flags, and before it looks at a result."""
    from triton.runtime.interpreter import interpreter_builder

    from weft.triton.resident_launch import KernelCalls

    dice = random.Random(seed)
    patched = []

    def patch(owner, name, most):
        inner = getattr(owner, name)

        def late(*arguments, **named):
            if dice.random() < 0.3:
                time.sleep(dice.random() * most)
            return inner(*arguments, **named)

        patched.append((owner, name, owner.__dict__.get(name)))
        setattr(owner, name, late)

    if dist.get_rank() == rank:
        patch(interpreter_builder, "set_grid_idx", 0.03)
        patch(interpreter_builder, "create_atomic_rmw", 0.005)
        patch(KernelCalls, "check", 0.05)
    return patched


def restore(patched):
    for owner, name, before in patched:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def check_late(late, seed):
    """Three kernels on plain pointers: nothing but their own flags keeps the ranks together."""
    from weft.triton import Host, Pointers, Tiles
    from weft.triton.checks import CHECKS, KernelCase

    region, _ = Host().allocate("test", 2**20, (), ())

    def exchange(said):
        heard = [None] * dist.get_world_size()
        dist.all_gather_object(heard, said)
        return heard

    space = Pointers(region.memory, region.bases.tolist(), dist.get_rank(), exchange, 20.0)
    case = KernelCase(torch.float32, calls=5, seed=seed, tiles=Tiles(16, 32, 32), grid=3)
    patched = slow(late, seed)
    try:
        return [CHECKS[name](space, case) for name in KERNELS[:3]]
    finally:
        restore(patched)


@pytest.mark.parametrize(("world", "late"), [(2, 1), (3, 0)])
def test_a_late_rank_changes_nothing(ranks, world, late):
    assert ranks(world).run(check_late, late, world) == [[True] * 3] * world


def check_late_engines(late):
    from weft.triton import Host, Tiles
    from weft.triton.checks import KernelCase, all_gather_gemm

    patched = slow(late, 5)
    try:
        return all_gather_gemm(Host(), KernelCase(torch.float32, calls=4, tiles=Tiles(16, 16, 16)))
    finally:
        restore(patched)


def test_a_late_rank_and_its_engines(ranks):
    assert ranks(2).run(check_late_engines, 1) == [True, True]


def check_layouts():
    """Transposed weights and strided rows are read in place."""
    from weft.triton import AllGatherGemm, GemmAllToAll, GemvAllReduce, Host

    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.arange(4 * world * 12.0).reshape(4 * world, 12)[:, ::2] % 5
    w = (torch.arange(6 * 5.0).reshape(5, 6) % 3).T
    host = Host()
    gathered = AllGatherGemm(host, 4 * world, 6, torch.float32)(x.tensor_split(world)[rank], w)
    summed = GemvAllReduce(host, 4, 5, torch.float32)(x[:4], w)
    moved = GemmAllToAll(host, 4 * world, 5, 6, torch.float32)(x, w)
    return (
        torch.equal(gathered, x @ w)
        and torch.equal(summed, (x[:4] @ w) * world)
        and torch.equal(moved, (x @ w).tensor_split(world)[rank].repeat(world, 1))
    )


def test_layouts_and_even_splits(ranks):
    assert ranks(2).run(check_layouts) == [True, True]


def two_results():
    from weft.triton import GemvAllReduce, Host

    op = GemvAllReduce(Host(), 1, 3, torch.float32)
    one, two, three = torch.ones(1, 1), 2 * torch.ones(1, 1), 3 * torch.ones(1, 1)
    w = torch.ones(1, 3)
    first, second = op(one, w), op(two, w)
    kept = first.clone(), second.clone()
    third = op(three, w)
    return (
        torch.equal(first, third)  # the next call but one takes its place, as the docs say
        and [float(kept[0][0, 0]), float(kept[1][0, 0])] == [2.0, 4.0]
        and torch.equal(second, kept[1])
    )


def test_a_result_stays_for_one_more_call(ranks):
    assert ranks(2).run(two_results) == [True, True]
