"""Point 7: every operator, schedule and dtype against plain torch, exactly, and all collectives;
then capture, a late peer, and a peer that never comes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import weft
from weft import fabric
from weft.errors import Error, Unsupported
from weft.measure.gpu.finding import Finding, State
from weft.measure.gpu.known_cases import (
    CASES,
    COLLECTIVES,
    COLUMNS,
    DTYPES,
    INNER,
    ROWS,
    equal,
    numbers,
    there,
)

SCHEDULES = (
    "serial",
    "shard-p2p",
    "uniform-fused-1d",
    "hetero-fused-1d",
    "hetero-unfused-1d",
    "uniform-fused-2d",
    "adaptive",
)


def exact(device: torch.device) -> Iterator[Finding]:
    """Every case with every schedule and dtype. A schedule that refuses with a reason is no
    mistake; a wrong number is."""
    for name, case in CASES.items():
        right, wrong, refused = 0, [], {}
        for schedule in SCHEDULES:
            for dtype in DTYPES:
                try:
                    good = case(device, dtype, schedule)
                except Unsupported as error:
                    refused[schedule] = str(error)
                    continue
                right += good
                if not good:
                    wrong.append(f"{schedule} {str(dtype).removeprefix('torch.')}")
        state: State = "not" if wrong else "ok" if right else "unknown"
        found = f"{right} exact"
        if refused:
            found += f", {len(refused)} schedules refused"
        remedy = f"wrong: {', '.join(wrong)}; report it" if wrong else ""
        if not right and not wrong:
            remedy = next(iter(refused.values()))
        yield Finding(7, name, state, found, remedy)
    for name, collective in COLLECTIVES.items():
        bad = [str(d).removeprefix("torch.") for d in DTYPES if not collective(device, d)]
        remedy = f"wrong: {', '.join(bad)}; report it" if bad else ""
        yield Finding(7, name, "not" if bad else "ok", f"{len(DTYPES) - len(bad)} exact", remedy)


def captured(device: torch.device, replays: int = 3) -> Finding:
    """A call in a graph, replayed with other numbers."""
    rank, world = dist.get_rank(), dist.get_world_size()
    what = f"capture, {replays} replays"
    if not fabric.of(None, device).can.capture:
        return Finding(7, what, "unknown", "refused", "this fabric cannot be captured")
    w = numbers(2, INNER, COLUMNS)
    shard = torch.zeros(ROWS, INNER, device=device)
    weight = there(w, device, torch.float32)
    weft.all_gather_matmul(shard, weight, schedule="adaptive")  # plans and memory are made here
    torch.accelerator.synchronize()
    dist.barrier()
    graph: Any = torch.accelerator.Graph()
    with torch.Stream(device):
        graph.capture_begin()
        y = weft.all_gather_matmul(shard, weight, schedule="adaptive")
        graph.capture_end()
    good = True
    for number in range(replays):
        x = numbers(50 + number, world * ROWS, INNER)
        shard.copy_(x.tensor_split(world)[rank].float())
        graph.replay()
        good &= equal(y, x @ w, torch.float32)
    return Finding(7, what, "ok" if good else "not", "exact" if good else "wrong")


def late(device: torch.device, seconds: float = 0.3) -> Finding:
    """The last rank comes late; the result must not depend on it."""
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(seconds)
    good = CASES["all_gather_matmul"](device, torch.float32, "adaptive")
    return Finding(7, "a late peer", "ok" if good else "not", "exact" if good else "wrong")


def absent(device: torch.device, seconds: float = 2.0) -> Finding:
    """The last rank never comes: the others raise in time, and their process goes on."""
    world, what = dist.get_world_size(), "a peer that never comes"
    if world == 1:
        return Finding(7, what, "unknown", "needs two ranks")
    group = dist.new_group()
    weft.configure(group=group, deadline=seconds)
    x, w = torch.ones(ROWS, INNER, device=device), torch.ones(INNER, COLUMNS, device=device)
    weft.all_gather_matmul(x, w, group=group)
    torch.accelerator.synchronize()
    dist.barrier()
    if dist.get_rank() == world - 1:
        return Finding(7, what, "ok", "was the one")
    begun, said = time.monotonic(), ""
    try:
        weft.all_gather_matmul(x, w, group=group)
        torch.accelerator.synchronize()
        weft.all_gather_matmul(x, w, group=group)  # raises what the last call ended with
    except Error as error:
        said = type(error).__name__
    took = time.monotonic() - begun
    alive = float((x @ w).sum().item()) == ROWS * INNER * COLUMNS
    good = bool(said) and alive and took < 3 * seconds + 10
    found = f"{said or 'no error'} after {took:.0f} s, the device goes on"
    if not alive:
        found = "the device is lost"
    return Finding(7, what, "ok" if good else "not", found, "" if good else "report it")


def kernels(device: torch.device) -> Iterator[Finding]:
    """The Triton kernels against plain torch."""
    from weft.triton import symmetric_memory
    from weft.triton.checks import CHECKS, KernelCase

    space = symmetric_memory(64 << 20)
    for name, run in CHECKS.items():
        good = all(run(space, KernelCase(dtype)) for dtype in DTYPES)
        found = "exact" if good else "wrong"
        yield Finding(
            7, f"triton {name}", "ok" if good else "not", found, "" if good else "report it"
        )
