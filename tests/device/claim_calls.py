"""Calls with a kernel that takes what has arrived: what `test_claims.py` has ranks do."""

from __future__ import annotations

import torch
import torch.distributed as dist
from device_calls import error_of, gathers, right, want

import weft

ROWS = (5, 0, 9, 4)
SCHEDULE = "in-kernel:3"


def _integers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def exact() -> str:
    """Uneven and empty shards, K that no tile divides, several weights of any layout, the gathered
    x, `out=`, narrow dtypes, the backward. What `weft.explain` says of the first."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = ROWS[-world:]
    x = torch.cat([_integers(n, rows[n], 40) for n in range(world)])
    own = x.split(rows)[rank].contiguous().to("loom")
    first, second = _integers(7, 40, 36), _integers(8, 33, 40).t()
    options = {"shard_rows": rows, "schedule": SCHEDULE}
    y = weft.all_gather_matmul(own, first.to("loom"), **options)
    said = str(weft.explain())
    assert torch.equal(y.cpu(), x @ first)
    weights = [first.to("loom"), second.to("loom")]
    ys, gathered = weft.all_gather_matmul(own, weights, return_gathered=True, **options)
    assert torch.equal(gathered.cpu(), x)
    assert torch.equal(ys[0].cpu(), x @ first)
    assert torch.equal(ys[1].cpu(), x @ second)
    out = torch.empty(sum(rows), 36, dtype=torch.bfloat16, device="loom")
    narrow = own.bfloat16(), first.to("loom").bfloat16()
    weft.all_gather_matmul(*narrow, out=out, **options)
    assert torch.equal(out.cpu(), (x @ first).bfloat16())
    empty = weft.all_gather_matmul(own[:, :0].contiguous(), weights[0][:0], **options)
    assert torch.equal(empty.cpu(), torch.zeros(sum(rows), 36))
    own.requires_grad_()
    weft.all_gather_matmul(own, weights[0], **options).sum().backward()
    total = world * first.sum(1).expand(rows[rank], 40)
    assert torch.equal(own.grad.cpu(), total)
    weft.check()
    return said


def result() -> torch.Tensor:
    """A result whose sums round, so that another order of a sum would be seen."""
    rank = dist.get_rank()
    x = torch.randn(24, 48, generator=torch.Generator().manual_seed(rank))
    w = torch.randn(48, 40, generator=torch.Generator().manual_seed(9))
    return weft.all_gather_matmul(x.to("loom"), w.to("loom"), schedule="in-kernel:4").cpu()


def refused() -> list[tuple[str, str]]:
    """What is refused, and that the group works after it."""
    x, w = torch.ones(8, 12, device="loom"), torch.ones(12, 6, device="loom")
    told = [
        error_of(lambda: weft.matmul_reduce_scatter(x, w, schedule="in-kernel")),
        error_of(lambda: weft.all_gather_matmul(x, w, schedule="in-kernel@cores")),
        error_of(lambda: weft.all_gather_matmul(x.double(), w.double(), schedule="in-kernel")),
    ]
    right(2)
    assert torch.equal(gathers(3, "in-kernel").cpu(), want(3))
    return told
