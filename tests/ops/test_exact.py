"""`all_gather_matmul` equals plain torch bit for bit: every schedule, dtype, size and world."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import check_call, integers, product, shard_of

import weft
from weft.plan.all_gather_matmul import AllGatherMatmul

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SIZES = [  # m, n, k
    (0, 3, 4),
    (1, 1, 1),
    (2, 5, 0),
    (7, 0, 3),
    (3, 2, 5),  # fewer rows than chunks
    (13, 7, 11),
    (16, 8, 16),
    (31, 3, 17),  # uneven shards, uneven chunks
]
MORE_NAMES = [
    "adaptive:1@dma",
    "adaptive:5@cores",
    "adaptive:3@direct",
    "uniform-unfused-1d@dma",
    "uniform-adaptive-1d:2@dma",
    "hetero-fused-1d-p2p:3@cores",
    "uniform-fused-2d-p2p:4@dma",
    "hetero-unfused-1d:64@dma",
]


def names(world: int) -> list[str]:
    space = weft.Schedule.space(AllGatherMatmul.of(1, 1, 1, world))
    return [schedule.name for schedule in space] + (MORE_NAMES if world > 1 else ["adaptive"])


def every_schedule(dtype: torch.dtype) -> int:
    calls = 0
    for name in names(dist.get_world_size()):
        sizes = SIZES if dtype in (torch.float32, torch.bfloat16) else SIZES[-2:]
        for seed, (m, n, k) in enumerate(sizes):
            check_call(m, n, k, dtype, seed=seed, schedule=name)
            calls += 1
    return calls


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_schedule(ranks, world, dtype):
    assert min(ranks(world).run(every_schedule, dtype)) >= 2


def eight_ranks() -> None:
    for name in ("serial", "shard-p2p", "uniform-fused-1d", "hetero-unfused-2d@cores", "adaptive"):
        check_call(13, 3, 5, schedule=name)
        check_call(40, 3, 9, torch.bfloat16, schedule=name)
    check_call(5, 3, 5, schedule="adaptive@direct")


def test_eight_ranks(ranks):
    ranks(8).run(eight_ranks)


def the_default() -> tuple[str, str]:
    check_call(12, 4, 8)
    unpaced = weft.explain().schedule
    group = dist.new_group()
    weft.configure(group=group, link="10GB/s")
    check_call(12, 4, 8, group=group)
    return unpaced, weft.explain().schedule


def test_the_default_schedule_fits_the_links(ranks):
    first, second = ranks(2).run(the_default)
    assert first == second
    assert first[0] == "adaptive@direct"  # at memory speed a copy would only cost


def larger() -> None:
    """Sizes at which BLAS takes other paths, and copies more than one piece of a link's turn."""
    for name in ("adaptive@dma", "adaptive@direct", "hetero-fused-1d@dma", "serial@cores"):
        for dtype in (torch.float32, torch.bfloat16):
            check_call(257, 129, 96, dtype, schedule=name)


def test_larger(ranks):
    ranks(2).run(larger)


def uneven() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    for rows in ([0, 5, 1, 0][:world], [9, 1, 1, 30][:world], [0, 0, 0, 0][:world]):
        x, w = integers((sum(rows), 7), torch.float32, 5), integers((7, 3), torch.float32, 6)
        shard = x.split(rows)[rank]
        for name in names(world):
            y = weft.all_gather_matmul(shard, w, schedule=name, shard_rows=rows)
            assert torch.equal(y, product(x, w)), (rows, name)


@pytest.mark.parametrize("world", [2, 4])
def test_shards_of_any_size_with_shard_rows(ranks, world):
    ranks(world).run(uneven)


def columns_that_differ() -> None:
    """N may be an even split over the ranks: each has its own columns."""
    x, w = integers((10, 6), torch.float32, 1), integers((6, 7), torch.float32, 2)
    own = w.tensor_split(dist.get_world_size(), dim=1)[dist.get_rank()]
    for name in names(dist.get_world_size()):
        assert torch.equal(weft.all_gather_matmul(shard_of(x), own, schedule=name), product(x, own))


def test_uneven_columns(ranks):
    ranks(3).run(columns_that_differ)
