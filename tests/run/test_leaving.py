"""A rank may leave as soon as its own call is over, while a peer still reads its memory."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import weft
from weft import fabric


def leave_early(schedule):
    """Rank 0 has little to pull and leaves at once; rank 1 pulls for a while longer."""
    weft.configure(link="0.01GB/s")
    rank, rows = dist.get_rank(), [2000, 8]
    x = torch.full((rows[rank], 64), rank + 1.0)
    y = weft.all_gather_matmul(x, torch.eye(64), shard_rows=rows, schedule=schedule)
    if rank == 0:
        fabric.of(None).close()
    dist.barrier()
    assert torch.equal(y[:, 0], torch.tensor([1.0, 2.0]).repeat_interleave(torch.tensor(rows)))


@pytest.mark.parametrize("schedule", ["adaptive@dma", "adaptive@direct", "serial@cores"])
def test_what_a_rank_leaves_behind_can_be_read(renewed_ranks, schedule):
    renewed_ranks(2).run(leave_early, schedule)
