"""Calls on several streams and groups: what the tests of streams have ranks do."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from device_calls import gathers, right, rows, want

import weft
from weft.fabric.device.board import ROOM


def two_groups() -> None:
    """Calls of two overlapping groups in turn, none of which waits for the device."""
    members = ((0, 1), (1, 2))
    groups = [dist.new_group(list(ranks)) for ranks in members]
    rank, made = dist.get_rank(), []
    for seed in range(1, 7):
        for group, ranks in zip(groups, members, strict=True):
            if rank in ranks:
                made.append((seed, group, gathers(seed, group=group)))
    for seed, group, result in made:
        assert torch.equal(result.cpu(), want(seed, group))
    dist.barrier()
    for group, ranks in zip(groups, members, strict=True):
        if rank in ranks:
            dist.destroy_process_group(group)


def side_streams() -> None:
    """Calls of one group from two streams that know nothing of each other."""
    right(1)
    given = [[tensor.to("loom") for tensor in rows(seed)] for seed in range(1, 9)]
    wanted = [want(seed) for seed in range(1, 9)]
    torch.accelerator.synchronize()
    dist.barrier()
    streams = [torch.Stream("loom"), torch.Stream("loom")]
    made = []
    for number, (x, w) in enumerate(given):
        with streams[number % 2]:
            made.append(weft.all_gather_matmul(x, w, schedule="adaptive@dma"))
    torch.accelerator.synchronize()
    for result, expected in zip(made, wanted, strict=True):
        assert torch.equal(result.cpu(), expected)


def freed_inputs() -> None:
    """The memory of inputs, and of results, is written anew right after the call."""
    for schedule in ("adaptive@dma", "adaptive@direct", "hetero-unfused-1d@cores"):
        for seed in range(1, 5):
            x, w = (tensor.to("loom") for tensor in rows(seed))
            place = x.data_ptr()
            result = weft.all_gather_matmul(x, w, schedule=schedule)
            del x, w
            again = [torch.full((8, 12), float("nan"), device="loom") for _ in range(4)]
            assert place in [tensor.data_ptr() for tensor in again]
            assert torch.equal(result.cpu(), want(seed))


def results_elsewhere() -> None:
    """A stream that waits for the caller's may use the result."""
    side = torch.Stream("loom")
    for seed in range(1, 4):
        result = gathers(seed)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            more = result + 1
        torch.accelerator.current_stream().wait_stream(side)
        more.record_stream(torch.accelerator.current_stream())
        assert torch.equal((more - 1).cpu(), want(seed))


def backward_twice() -> None:
    """autograd calls from threads of its own, on the stream of the forward pass."""
    side = torch.Stream("loom")
    for seed, stream in ((1, None), (2, side), (3, None)):
        x, w = (tensor.to("loom").requires_grad_() for tensor in rows(seed))
        side.wait_stream(torch.accelerator.current_stream())
        with stream or torch.accelerator.current_stream():
            weft.all_gather_matmul(x, w, schedule="adaptive@dma").sum().backward()
        torch.accelerator.current_stream().wait_stream(side)
        plain_x, plain_w = (tensor.requires_grad_() for tensor in rows(seed))
        world = dist.get_world_size()
        (plain_x @ plain_w).sum().backward()
        assert torch.equal(x.grad.cpu(), plain_x.grad * world)
        total = plain_w.grad.clone()
        dist.all_reduce(total)
        assert torch.equal(w.grad.cpu(), total)
        torch.accelerator.synchronize()


def far_ahead() -> None:
    """More calls than headers fit on a board, ahead of a peer that starts late."""
    right(1)
    x, w = (tensor.to("loom") for tensor in rows(2))
    wanted = want(2)
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(0.5)
    made = [weft.all_gather_matmul(x, w, schedule="adaptive@dma") for _ in range(2 * ROOM + 10)]
    for result in made:
        assert torch.equal(result.cpu(), wanted)
    weft.check()


def programs_in_turn() -> None:
    """Calls of different programs, all enqueued at once, while the device of one rank is slow: the
    fast ranks post words of later calls while others still wait for those of earlier ones."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x, w = (tensor.to("loom") for tensor in rows(3, 9))
    whole = want(3, count=9)
    partial = rows(3, 9)
    sums = partial[0] @ partial[1]
    dist.all_reduce(sums)
    calls = [
        (weft.matmul_reduce_scatter, "adaptive@dma", sums.tensor_split(world)[rank]),
        (weft.matmul_all_reduce, "uniform-fused-1d", sums),
        (weft.all_gather_matmul, "adaptive@dma", whole),
        (weft.matmul_all_reduce, "adaptive@direct", sums),
        (weft.matmul_reduce_scatter, "serial@dma", sums.tensor_split(world)[rank]),
    ]
    for function, schedule, _ in calls:
        function(x, w, schedule=schedule)
    torch.accelerator.synchronize()
    for slow in range(world):
        dist.barrier()
        made = []
        for number, (function, schedule, _) in enumerate(calls):
            if rank == slow and number % 2 == 0:
                driver = weft.fabric.of(None, "loom").driver
                driver.sleep(0.05, torch.accelerator.current_stream())
            made.append(function(x, w, schedule=schedule))
        for result, (function, schedule, wanted) in zip(made, calls, strict=True):
            assert torch.equal(result.cpu(), wanted), (slow, function.__name__, schedule)
