"""The overhead of a call beyond its work: tiny products with cached plans, against gloo + mm."""

from __future__ import annotations

import statistics

import torch
import torch.distributed as dist

from weft.benchmarks import Check, Result
from weft.measure.launch import Report, all_gather_flat, launch
from weft.measure.measurement import interleaved

SIZE = 64
WORLD = 2
CALLS = 20
"""The number of calls per sample, so that the common start does not matter."""
REPEAT = 60
SCHEDULES = ("adaptive@direct", "adaptive@dma", "serial@dma")


def run(report: Report) -> Result:
    """Median microseconds of one call with M = N = K = 64."""
    medians = launch(WORLD, _measure, report=report)[0]
    rows = [[name, round(seconds * 1e6, 1)] for name, seconds in medians.items()]
    best = medians["adaptive@direct"] * 1e6
    checks = [Check(f"adaptive@direct, {SIZE}^3, {WORLD} ranks: us a call", best, "<= 100")]
    return Result(("arm", "us a call"), rows, checks)


quick = run
"""The whole benchmark takes only some seconds."""


def _measure(report: Report) -> dict[str, float]:
    import weft

    random = torch.Generator().manual_seed(dist.get_rank())
    shard = torch.randn(SIZE // WORLD, SIZE, generator=random)
    w = torch.randn(SIZE, SIZE, generator=random)
    gathered = torch.empty(SIZE, SIZE)

    def gloo() -> None:
        for _ in range(CALLS):
            all_gather_flat(gathered, shard)
            torch.mm(gathered, w)

    def alone() -> None:
        for _ in range(CALLS):
            torch.mm(gathered, w)

    arms = {"mm alone": alone, "gloo + mm": gloo}
    for name in SCHEDULES:

        def overlapped(name: str = name) -> None:
            for _ in range(CALLS):
                weft.all_gather_matmul(shard, w, schedule=name)

        arms[name] = overlapped
    samples = interleaved(arms, REPEAT, report)
    return {name: statistics.median(values) / CALLS for name, values in samples.items()}
