"""Operators on the emulated device, beside the same operators on the host, in one run.

loom computes on the same cores, so its times say nothing about a GPU. What they show is whether the
stream programs overlap what they should, and whether the host is free while a known call runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from weft.benchmarks import Check, Result
from weft.fabric import Link, of
from weft.loom.build import library, why_not
from weft.measure.arms import arms_of
from weft.measure.launch import Report, launch
from weft.measure.link_spec import busiest_link
from weft.measure.measurement import (
    finished,
    interleaved,
    percent_over_rounds,
    prepare_device,
    timed,
)
from weft.operation import find

OPERATORS = ("all_gather_matmul", "matmul_reduce_scatter")
SHAPE = (2048, 1024, 2048)
WORLD = 2
REPEAT = 15
SERIAL, ADAPTIVE = "serial@dma", "adaptive@dma"
DEVICES = ("cpu", "loom")


def run(report: Report) -> Result:
    """Percent of ideal on a balanced link, on the host and on loom, and what the host waits for."""
    reason = why_not()
    if reason:
        return Result(("operator",), [], [Check(f"loom cannot run here: {reason}", 0.0, ">= 1")])
    library(report)
    rows: list[list[str | float]] = []
    checks = []
    for name in OPERATORS:
        figures = launch(WORLD, _measure, name, report=report)[0]
        host, device = figures["cpu"], figures["loom"]
        rows.append([name, host, device, round(100 * figures["issue"], 2)])
        checks += [
            Check(f"{name}: loom, % of ideal", device, ">= 80"),
            Check(f"{name}: loom / host, % of ideal", device / host, ">= 0.95"),
            Check(f"{name}: host busy in a known call, %", 100 * figures["issue"], "<= 5"),
        ]
    headers = ("operator", "host % of ideal", "loom % of ideal", "host busy %")
    return Result(headers, rows, checks)


def _measure(report: Report, name: str) -> dict[str, float]:
    operation = find(name).of(*SHAPE, WORLD, "float32")
    arms: dict[str, Callable[[], None]] = {}
    for device in DEVICES:
        finish = prepare_device(device)
        fabric = of(None, device)
        made = arms_of(operation, fabric)
        compute = finished(made.compute, finish)
        alone = torch.tensor(statistics.median(timed(compute) for _ in range(5)))
        dist.all_reduce(alone, dist.ReduceOp.MAX)
        fabric.set_link(Link(busiest_link(operation, "mesh") / alone.item()))
        own = {
            "compute": made.compute,
            "communication": made.communicate,
            SERIAL: made.call(SERIAL),
            ADAPTIVE: made.call(ADAPTIVE),
        }
        arms.update({f"{device} {arm}": finished(call, finish) for arm, call in own.items()})
    issue: list[float] = []

    def enqueue() -> None:
        begin = time.perf_counter()
        own[ADAPTIVE]()
        enqueued = time.perf_counter() - begin
        torch.accelerator.synchronize()
        issue.append(enqueued / (time.perf_counter() - begin))

    arms["enqueue"] = enqueue
    samples = interleaved(arms, REPEAT, report)
    found = {"issue": statistics.median(issue)}
    for device in DEVICES:
        prefix = f"{device} "
        some = {arm.removeprefix(prefix): s for arm, s in samples.items() if prefix in arm}
        found[device] = percent_over_rounds(some, ADAPTIVE, SERIAL)
    return found
