"""Every function that soak calls is right on a device, in threads as well."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import weft
from weft.measure.soak import burst, subjects


def bursts(kind: str) -> tuple[set[str], list[str]]:
    """The functions that were called, and what was wrong."""
    groups = burst.Groups("loom")
    called, wrong = set(), []
    try:
        for seed in range(3):
            said = burst.burst(groups, seed, 40, kind)
            called |= set(said.calls)
            wrong += [*said.wrong, *([said.error] if said.error else [])]
    finally:
        for group in (*groups.threads, *groups.some[1:]):
            dist.destroy_process_group(group)
    return called, wrong


@pytest.mark.parametrize("kind", ["whole", "threads"])
def test_every_function_is_right(loom, kind):
    for called, wrong in loom(2, mode="random").run(bursts, kind):
        assert wrong == []
        assert called == set(subjects.subjects())


def eight_by_cores() -> bool:
    """Float8 rows that kernels copy."""
    rank, world, one = dist.get_rank(), dist.get_world_size(), torch.ones((), device="loom")
    x = (torch.arange(8 * 16) % 5 - 2.0).view(8, 16)
    shard = x.tensor_split(world)[rank].to(torch.float8_e4m3fn).to("loom")
    w = torch.ones(16, 16).to(torch.float8_e4m3fn).to("loom")
    y = weft.all_gather_scaled_matmul(
        shard, w, one, one, out_dtype=torch.float32, schedule="serial@cores"
    )
    return torch.equal(y.cpu(), x @ torch.ones(16, 16))


def test_kernels_copy_float8(loom):
    assert loom(2).run(eight_by_cores) == [True, True]


def gradients_of_gathered_rows() -> bool:
    """Gathered and received rows are results, so gradients come through them as well."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.ones(4, 3, device="loom", requires_grad=True)
    w = torch.full((3, 2), 2.0, device="loom")
    y, gathered = weft.all_gather_matmul(x, w, return_gathered=True)
    (y.sum() + gathered[:, 0].sum() * (rank + 1)).backward()
    expected = torch.full((4, 3), 4.0 * world)
    expected[:, 0] += sum(range(1, world + 1))
    z = torch.ones(2 * world, 3, device="loom", requires_grad=True)
    y, received = weft.all_to_all_matmul(z, w, [2] * world, [2] * world, return_gathered=True)
    (y.sum() + received.sum()).backward()
    return torch.equal(x.grad.cpu(), expected) and bool((z.grad.cpu() == 5).all())


def test_gradients_of_gathered_rows(loom):
    assert loom(2).run(gradients_of_gathered_rows) == [True, True]
