"""A rank dies inside a call that communicates from inside its kernel."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from rank_pools import PATIENCE
from ranks import tell

import weft
from weft import PeerLost

WITHIN = 5.0 * min(PATIENCE, 2.0)


def lookups() -> torch.Tensor:
    tables = [torch.ones(50, 64), torch.ones(30, 32)]
    indices = [torch.arange(40), torch.arange(20)]
    offsets = [torch.arange(0, 40).clamp(max=n) for n in (40, 20)]
    return weft.embedding_all_to_all(tables, indices, offsets)


def few_rows() -> torch.Tensor:
    return weft.matmul_all_reduce(torch.ones(4, 64), torch.ones(64, 600))


def many_rows() -> torch.Tensor:
    each = [20] * dist.get_world_size()
    x, w = torch.ones(sum(each), 8), torch.ones(8, 64)
    return weft.matmul_all_to_all(x, w, each, each, schedule="in-kernel:4")


def endless(call, link: str) -> None:
    """Calls that are known by now, on a link on which each takes most of a second, or none."""
    for _ in range(3):
        call()
    weft.configure(link=link)
    until = time.monotonic() + 20
    tell("calling")
    while time.monotonic() < until:
        call()


@pytest.mark.parametrize("link", ["0.01MB/s", "memory"])
@pytest.mark.parametrize("call", [lookups, few_rows, many_rows])
def test_a_rank_is_killed(fresh_ranks, call, link):
    pool = fresh_ranks(3)
    job = pool.start(endless, call, link)
    job.hear("calling")
    time.sleep(0.3)
    killed = pool.kill(1)
    outcomes = job.outcomes()
    for rank in (0, 2):
        error = outcomes[rank].error
        assert isinstance(error, PeerLost), outcomes[rank]
        assert error.rank == 1
        assert "rank 1 died" in str(error), "named at first hand"
        assert outcomes[rank].at - killed < WITHIN
