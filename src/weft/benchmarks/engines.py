"""Parts of the host fabric on their own: a copy on an engine, and a wake-up by a signal."""

from __future__ import annotations

import statistics

import torch
import torch.distributed as dist

from weft.benchmarks import Check, Result
from weft.fabric import Fabric, of
from weft.fabric.host.probe import copy_and_memcpy, wake_up
from weft.measure.launch import Report, launch

COPY_BYTES = 16 << 20
REPEAT = 60
SLEEP = 2e-3
"""Seconds before the signal to a sleeping waiter: long enough that it has stopped spinning."""
SPIN = 20e-6
"""Seconds before the signal to a spinning waiter: short enough that it does not sleep yet."""


def run(report: Report) -> Result:
    """A 16 MiB copy against memcpy; the time from a signal until the waiter runs."""
    figures = launch(2, _measure, pin=False, report=report)[1]
    memcpy, copy = figures["memcpy"] * 1e3, figures["copy"] * 1e3
    asleep, spinning = figures["asleep"] * 1e6, figures["spinning"] * 1e6
    rows: list[list[str | float]] = [
        ["memcpy 16 MiB", f"{memcpy:.3f} ms"],
        ["dma copy 16 MiB", f"{copy:.3f} ms"],
        ["wake-up, waiter asleep", f"{asleep:.2f} us"],
        ["wake-up, waiter spinning", f"{spinning:.2f} us"],
    ]
    checks = [
        Check("dma copy of 16 MiB / memcpy", copy / memcpy, "<= 1.15"),
        Check("wake-up of a sleeping waiter, us", asleep, "<= 20"),
        Check("wake-up of a spinning waiter, us", spinning, "<= 2"),
    ]
    return Result(("what", "median"), rows, checks)


quick = run
"""The whole benchmark takes only some seconds."""


def _measure(report: Report) -> dict[str, float]:
    fabric = of(None)
    figures = _copies(fabric)
    report(0.5, "wake-ups")
    figures["asleep"] = _wake_ups(fabric, SLEEP)
    figures["spinning"] = _wake_ups(fabric, SPIN)
    return figures


def _copies(fabric: Fabric) -> dict[str, float]:
    """Rank 1 pulls rank 0's memory, by its engine and by memcpy in turn."""
    source = fabric.memory.empty((COPY_BYTES,), torch.uint8)
    source.fill_(fabric.rank + 1)
    target = torch.zeros(COPY_BYTES, dtype=torch.uint8)
    memcpy, copy = [], []
    for number in range(REPEAT + 5):
        dist.barrier()
        seconds = copy_and_memcpy(fabric, source, target)
        if seconds is not None and number >= 5:
            memcpy.append(seconds[0])
            copy.append(seconds[1])
    if fabric.rank != 1:
        return {}
    if int(target[0]) != 1 or int(target[-1]) != 1:
        raise RuntimeError("the copy engine did not copy")
    return {"memcpy": statistics.median(memcpy), "copy": statistics.median(copy)}


def _wake_ups(fabric: Fabric, delay: float) -> float:
    """Median seconds from rank 0's signal to rank 1 running again."""
    times = torch.tensor([wake_up(fabric, delay) for _ in range(REPEAT)], dtype=torch.int64)
    both = [torch.empty_like(times) for _ in range(2)]
    dist.all_gather(both, times)
    delays: list[int] = (both[1] - both[0]).tolist()
    return statistics.median(delays) / 1e9
