"""Calls on several streams and groups: what the tests of streams have ranks do."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from device_calls import gathers, right, rows, stated, want

import weft
from weft.fabric.device import program as programs
from weft.fabric.device.board import ROOM
from weft.fabric.device.flight import DeviceFlight


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
            made.append(stated(x, w, schedule="adaptive@dma"))
    torch.accelerator.synchronize()
    for result, expected in zip(made, wanted, strict=True):
        assert torch.equal(result.cpu(), expected)


def freed_inputs() -> None:
    """The memory of inputs, and of results, is written anew right after the call."""
    for schedule in ("adaptive@dma", "adaptive@direct", "hetero-unfused-1d@cores"):
        for seed in range(1, 5):
            x, w = (tensor.to("loom") for tensor in rows(seed))
            place = x.data_ptr()
            result = stated(x, w, schedule=schedule)
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
            stated(x, w, schedule="adaptive@dma").sum().backward()
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
    made = [stated(x, w, schedule="adaptive@dma") for _ in range(2 * ROOM + 10)]
    for result in made:
        assert torch.equal(result.cpu(), wanted)
    weft.check()


class SlowFlight(DeviceFlight):
    """A call on a device that takes its time between two steps."""

    def _end_of(self, step):
        self._driver.sleep(0.01, self._streams[step.stream])
        super()._end_of(step)


def programs_in_turn() -> None:
    """Calls of different programs, all enqueued at once, while the device of one rank is slow: the
    fast ranks post words of later calls while others still wait for those of earlier ones."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x, w = (tensor.to("loom") for tensor in rows(3, 9))
    sums = torch.matmul(*rows(3, 9))
    dist.all_reduce(sums)
    own = sums.tensor_split(world)[rank]
    calls = [
        (weft.matmul_reduce_scatter, "serial@dma", own),
        (weft.matmul_reduce_scatter, "hetero-unfused-1d@dma", own),
        (weft.matmul_all_reduce, "uniform-fused-1d", sums),
        (weft.matmul_reduce_scatter, "shard-p2p", own),
        (weft.matmul_all_reduce, "serial@dma", sums),
    ]
    for function, schedule, _ in calls:
        function(x, w, schedule=schedule)
    torch.accelerator.synchronize()
    for slow in range(world):
        dist.barrier()
        made = []
        programs.DeviceFlight = SlowFlight if rank == slow else DeviceFlight
        try:
            made = [function(x, w, schedule=schedule) for function, schedule, _ in calls]
        finally:
            programs.DeviceFlight = DeviceFlight
        for result, (function, schedule, wanted) in zip(made, calls, strict=True):
            assert torch.equal(result.cpu(), wanted), (slow, function.__name__, schedule)


def host_blocks(schedule: str, calls: int = 6, rounds: int = 3) -> float:
    """The part of the time of known calls that passes before the host has enqueued them: the least
    of several rounds, for the machine may be busy with something else."""
    x = torch.rand(256, 256).to("loom")
    w = torch.rand(256, 64).to("loom")
    for _ in range(3):
        stated(x, w, schedule=schedule)
    least = 1.0
    for _ in range(rounds):
        torch.accelerator.synchronize()
        dist.barrier()
        began = time.perf_counter()
        for _ in range(calls):
            stated(x, w, schedule=schedule)
        blocked = time.perf_counter() - began
        torch.accelerator.synchronize()
        least = min(least, blocked / (time.perf_counter() - began))
    return least
