"""Parts of the host fabric on their own: a copy on an engine, and a wake-up by a signal."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

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

Times = dict[str, list[float]]
"""Seconds of all rounds, by what was measured."""


def run(report: Report) -> Result:
    """A 16 MiB copy against memcpy; the time from a signal until the waiter runs, against that from
    a write to a pipe until its reader runs. All take turns on the same two processes."""
    with tempfile.TemporaryDirectory() as folder:
        pipe = Path(folder) / "pipe"
        os.mkfifo(pipe)
        times = launch(2, _measure, str(pipe), pin=False, report=report)[1]
    middle = {what: statistics.median(seconds) for what, seconds in times.items()}
    rows = [[what, _text(seconds), _spread(seconds)] for what, seconds in times.items()]
    checks = [
        Check("dma copy of 16 MiB / memcpy", middle["dma copy"] / middle["memcpy"], "<= 1.15"),
        Check("wake-up of a sleeping waiter / pipe", middle["asleep"] / middle["pipe"], "<= 1.1"),
        Check("wake-up of a spinning waiter / pipe", middle["spinning"] / middle["pipe"], "<= 0.1"),
    ]
    return Result(("what", "median", "middle half"), rows, checks)


quick = run
"""The whole benchmark takes only some seconds."""


def _text(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e6:.2f} us"


def _spread(seconds: Sequence[float]) -> str:
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return f"{low * 1e6:.2f} to {high * 1e6:.2f}"


def _measure(report: Report, pipe: str) -> Times:
    fabric = of(None)
    times = _copies(fabric)
    report(0.5, "wake-ups")
    return times | _wake_ups(fabric, pipe)


def _copies(fabric: Fabric) -> Times:
    """Rank 1 pulls rank 0's memory, by its engine and by memcpy in turn."""
    source = fabric.memory.empty((COPY_BYTES,), torch.uint8)
    source.fill_(fabric.rank + 1)
    target = torch.zeros(COPY_BYTES, dtype=torch.uint8)
    times: Times = {"memcpy": [], "dma copy": []}
    for number in range(REPEAT + 5):
        dist.barrier()
        seconds = copy_and_memcpy(fabric, source, target)
        if seconds is not None and number >= 5:
            times["memcpy"].append(seconds[0])
            times["dma copy"].append(seconds[1])
    if fabric.rank == 1 and (int(target[0]) != 1 or int(target[-1]) != 1):
        raise RuntimeError("the copy engine did not copy")
    return times


def _wake_ups(fabric: Fabric, pipe: str) -> Times:
    """Seconds from rank 0's signal, or its write to the pipe, to rank 1 running again."""
    moments: dict[str, list[int]] = {"pipe": [], "asleep": [], "spinning": []}
    with open(pipe, "r+b", buffering=0) as ends:  # both ends, so that opening waits for nobody
        for _ in range(REPEAT):
            moments["pipe"].append(_wake_reader(fabric, ends.fileno()))
            moments["asleep"].append(wake_up(fabric, SLEEP))
            moments["spinning"].append(wake_up(fabric, SPIN))
    both: list[dict[str, list[int]]] = [{}, {}]
    dist.all_gather_object(both, moments)
    return {
        what: [(ran - sent) / 1e9 for sent, ran in zip(both[0][what], both[1][what], strict=True)]
        for what in moments
    }


def _wake_reader(fabric: Fabric, pipe: int) -> int:
    """As `probe.wake_up` with a sleeping waiter, by a pipe: the plain means of the system."""
    dist.barrier()
    if fabric.rank == 1:
        os.read(pipe, 1)
        moment = time.monotonic_ns()
    else:
        time.sleep(SLEEP)
        moment = time.monotonic_ns()
        os.write(pipe, b"!")
    dist.barrier()
    return moment
