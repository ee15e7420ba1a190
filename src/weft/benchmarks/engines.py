"""The parts of the host fabric by themselves: a copy on an engine, a wake-up by a signal."""

from __future__ import annotations

import ctypes
import statistics
import time

import torch
import torch.distributed as dist

from weft.benchmarks import Check, Result
from weft.fabric import HostFabric, _native, of
from weft.measure.launch import Report, launch

COPY_BYTES = 16 << 20
REPEAT = 60
SLEEP = 2e-3
"""How long the other side waits before it signals a sleeping waiter: far beyond any spinning."""
SPIN = 20e-6
"""The same for a spinning one: well before it would fall asleep."""


def run(report: Report) -> Result:
    """A 16 MiB copy against memcpy; signal set to waiter running, asleep and spinning."""
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


def _measure(report: Report) -> dict[str, float]:
    fabric = of(None)
    figures = _copies(fabric)
    report(0.5, "wake-ups")
    figures["asleep"] = _wake_ups(fabric, SLEEP)
    figures["spinning"] = _wake_ups(fabric, SPIN)
    return figures


def _copies(fabric: HostFabric) -> dict[str, float]:
    """Rank 1 pulls rank 0's memory, by its engine and by memcpy in turn."""
    native, source = fabric.native, fabric.symmetric_empty((COPY_BYTES,), torch.uint8)
    source.fill_(fabric.rank + 1)
    target = torch.zeros(COPY_BYTES, dtype=torch.uint8)
    program = _native.Program()
    program.add(0, 0, False, (0, 0, 0, COPY_BYTES), (1, 0, 0, COPY_BYTES), 1, COPY_BYTES, [], 0, [])
    memcpy, copy = [], []
    for number in range(REPEAT + 5):
        call = fabric.next_call()
        dist.barrier()
        native.enter(call, 0, [native.offset_of(source.data_ptr())], b"")
        deadline = fabric.deadline_ns()
        fabric.wait(lambda c=call, d=deadline: native.agree(c, [], d), "bench", "the ranks")  # type: ignore[misc]
        if fabric.rank == 1:
            pointer = native.peer_pointer(call, 0, 0)
            start = time.perf_counter()
            ctypes.memmove(target.data_ptr(), pointer, COPY_BYTES)
            between = time.perf_counter()
            flight = native.launch(program, call, deadline, [target.data_ptr()], [0, 0], False)
            fabric.wait(lambda f=flight: native.finish(f), "bench", "the copy")  # type: ignore[misc]
            end = time.perf_counter()
            if number >= 5:
                memcpy.append(between - start)
                copy.append(end - between)
        native.done(call)
    if fabric.rank != 1:
        return {}
    if int(target[0]) != 1 or int(target[-1]) != 1:
        raise RuntimeError("the copy engine did not copy")
    return {"memcpy": statistics.median(memcpy), "copy": statistics.median(copy)}


def _wake_ups(fabric: HostFabric, delay: float) -> float:
    """Median seconds from rank 0's signal to rank 1 running again."""
    native, program = fabric.native, _native.Program()
    moments = []
    for _ in range(REPEAT):
        call = fabric.next_call()
        native.enter(call, 0, [], b"")
        flight = native.launch(program, call, fabric.deadline_ns(), [], [], False)
        if fabric.rank == 1:
            native.signal(call, 1, [])
            moments.append(native.wait_timed(flight, 0, 0))
        else:
            native.wait(flight, 1, 1)
            until = time.perf_counter() + delay
            while time.perf_counter() < until:
                pass
            moments.append(native.signal(call, 0, []))
        native.done(call)
        dist.barrier()
    times = torch.tensor(moments, dtype=torch.int64)
    both = [torch.empty_like(times) for _ in range(2)]
    dist.all_gather(both, times)
    delays: list[int] = (both[1] - both[0]).tolist()
    return statistics.median(delays) / 1e9
