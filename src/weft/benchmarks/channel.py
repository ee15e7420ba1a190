"""Compares the sizes that the channel of collectives uses with alternatives, to choose them and to
check them on this machine.

    small   the largest message that is sent inside the announcement, next to its flag
    chunk   the bytes that are posted in a ring at once, at least and at most: a quarter of the
            message between these. A ring holds 512 KiB of chunks
    stream  the size from which on results bypass the cache
    past    whether chunks in rings bypass the cache. Shipped is what was faster in the first calls
            of a size; "rings cached" and "rings past" are either of them always

All tunings take turns in one run. Between two calls of one tuning, the calls of others use the
caches.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist

from weft.benchmarks import Check, Result
from weft.collectives import group_channel as channels
from weft.collectives.group_channel import ALWAYS, NEVER, Tuning
from weft.collectives.group_channel import SHIPPED as TUNING
from weft.measure.launch import Report, launch

WORLD = 2
KIB = (4, 16, 64, 256, 1024, 4096, 16384)
"""KiB of each rank's input."""
KINDS = ("all_gather", "all_to_all", "all_reduce")

_NEVER = 2**62


def _chunk(size: int) -> Tuning:
    return TUNING._replace(least_chunk=size, most_chunk=size)


SHIPPED = "shipped"
TUNINGS: dict[str, Tuning] = {
    SHIPPED: TUNING,
    "small 8K": TUNING._replace(small=8 << 10),
    "chunk 16K+": TUNING._replace(least_chunk=16 << 10),
    "chunk 32K": _chunk(32 << 10),
    "chunk 64K": _chunk(64 << 10),
    "chunk 256K": _chunk(256 << 10),
    "stream 2M": TUNING._replace(stream=2 << 20),
    "no stream": TUNING._replace(stream=_NEVER),
    "rings cached": TUNING._replace(past=NEVER),
    "rings past": TUNING._replace(past=ALWAYS),
}

Samples = dict[tuple[str, int], dict[str, list[float]]]


def run(report: Report) -> Result:
    """2 ranks, fp32, 4 KiB to 16 MiB per rank: microseconds per tuning."""
    samples: Samples = launch(WORLD, _sweep, report=report)[0]
    times = {
        key: {name: statistics.median(taken) for name, taken in by_tuning.items()}
        for key, by_tuning in samples.items()
    }
    rows: list[list[str | float | int | None]] = [
        [kind, kib, *(round(times[kind, kib][name] * 1e6, 1) for name in TUNINGS)]
        for kind in KINDS
        for kib in KIB
    ]
    behind = [taken[SHIPPED] / min(taken.values()) for taken in times.values()]
    check = Check("shipped sizes / the best of the sweep, mean", statistics.mean(behind), "<= 1.1")
    return Result(("collective", "KiB", *TUNINGS), rows, [check])


def _sweep(report: Report) -> Samples:
    import weft

    world, native = dist.get_world_size(), channels.of().native
    together = torch.zeros(1)
    found: Samples = {}
    for number, kib in enumerate(KIB):
        report(number / len(KIB), f"{kib} KiB, {len(TUNINGS)} tunings in turn")
        x = torch.randn(kib * 256)
        y, z = torch.empty(kib * 256 * world), torch.empty(kib * 256)
        calls: Mapping[str, Callable[[], object]] = {
            "all_gather": partial(weft.all_gather, x, out=y),
            "all_to_all": partial(weft.all_to_all, x, out=z),
            "all_reduce": partial(weft.all_reduce, x, out=z),
        }
        repeat, several = (30, 5) if kib <= 256 else (15, 1)
        names = list(TUNINGS)
        for turn in range(repeat + 1):
            names = names[1:] + names[:1]  # a different tuning comes first in every turn
            for name in names:
                weft.all_reduce(together, out=together)  # nothing is in flight when sizes change
                native.tune(*TUNINGS[name])
                for kind, call in calls.items():
                    weft.all_reduce(together, out=together)
                    started = time.perf_counter()
                    for _ in range(several):
                        call()
                    taken = (time.perf_counter() - started) / several
                    if turn:  # the first call touches new memory
                        found.setdefault((kind, kib), {}).setdefault(name, []).append(taken)
    return found
