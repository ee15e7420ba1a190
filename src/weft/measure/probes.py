"""Probes of this machine. All ranks of a group run them at the same time, because ranks slow each
other down, and a single rank would measure a machine that no schedule ever has to itself.

The work of a single thread is timed by its core time, so that other processes on its core do not
count. Probes take many samples in turns and return the lower quartile: it shows the undisturbed
machine, and does not depend on a single lucky sample.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist

from weft.fabric import Fabric, Link
from weft.fabric.host.probe import EngineCopies, Strip, look_at_counters, round_trip
from weft.ops.all_gather_matmul import all_gather_matmul
from weft.plan.adaptive import largest_run, merged
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.plan.tasks import Matmul
from weft.schedule import Schedule

POOL = 8 << 20
"""The bytes that copies cycle through: more than a core's own cache, as in real calls."""
AWAY = 2e-4
"""A thread that only reads the clock has lost its core if this many seconds pass in between."""
WARM = 1e-3
"""A GEMM is repeated until a sample takes this long, so that W is in the cache, as it is for the
chunks of a call."""


class Gemm(NamedTuple):
    """One GEMM to time."""

    dtype: str
    m: int
    n: int
    k: int


def quartile(samples: Sequence[float]) -> float:
    """The lower quartile."""
    return sorted(samples)[(len(samples) - 1) // 4]


def everywhere(fabric: Fabric, seconds: float) -> float:
    """The mean over all ranks of the group. Collective."""
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, group=fabric.group)
    return value.item() / fabric.world


def gemm_seconds(
    fabric: Fabric,
    points: Sequence[Gemm],
    rounds: int,
    budget: float,
    report: Callable[[float], None],
) -> dict[Gemm, float]:
    """The seconds of every GEMM while all ranks are busy. The points take turns.

    Runs `rounds` rounds, or fewer if they take `budget` seconds, but at least two.
    """
    runs = {point: _multiplication(point) for point in points}
    repeats = {point: _repeats(run) for point, run in runs.items()}
    samples: dict[Gemm, list[float]] = {point: [] for point in points}
    start = time.perf_counter()
    for number in range(rounds):
        spent = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(spent, dist.ReduceOp.MAX, group=fabric.group)
        if number >= 2 and spent.item() * (number + 1) / number > budget:
            break
        for point, run in runs.items():
            samples[point].append(_mean(run, repeats[point]))
        report((number + 1) / rounds)
    # Core time of a single thread has no lucky samples, so the minimum is the undisturbed time.
    own = torch.tensor([min(samples[point]) for point in points], dtype=torch.float64)
    dist.all_reduce(own, group=fabric.group)
    return dict(zip(points, (own / fabric.world).tolist(), strict=True))


def _multiplication(point: Gemm) -> Callable[[], object]:
    dtype: torch.dtype = getattr(torch, point.dtype)
    a = torch.ones(point.m, point.k, dtype=dtype)
    b = torch.ones(point.k, point.n, dtype=dtype)
    c = torch.empty(point.m, point.n, dtype=dtype)
    return lambda: torch.mm(a, b, out=c)


def _repeats(run: Callable[[], object]) -> int:
    run()
    return max(1, int(WARM / max(_mean(run, 1), 1e-6)))


def _mean(run: Callable[[], object], repeat: int) -> float:
    """The mean core time of a run, over `repeat` runs after a warm-up."""
    if repeat > 1:
        run()
    start = time.thread_time()
    for _ in range(repeat):
        run()
    return (time.thread_time() - start) / repeat


class Pull:
    """Copies on this rank's engine, from the next rank's memory or within its own."""

    def __init__(self, fabric: Fabric, local: bool = False) -> None:
        self.fabric = fabric
        self.source = fabric.memory.empty((POOL,), torch.uint8)
        self.source.fill_(1)
        self.target = torch.zeros(POOL, dtype=torch.uint8)
        self.peer = fabric.rank if local else (fabric.rank + 1) % fabric.world

    def __call__(
        self,
        size: int,
        count: int,
        row_bytes: int | None = None,
        holds_core: bool = False,
        beside: Callable[[], None] | None = None,
    ) -> tuple[list[tuple[float, float]], float]:
        """Queues `count` copies of `size` bytes. Returns (start, end) of each copy, and the core
        time of the engine. `beside` is called while they run; without it, this thread sleeps.
        Collective."""
        fabric = self.fabric
        row, pitch = (size, size) if row_bytes is None else (row_bytes, 4 * row_bytes)
        rows = size // row
        span = pitch * rows
        strips = [
            Strip(number * span % (POOL - span + 1), rows, row, pitch) for number in range(count)
        ]
        copies = EngineCopies(fabric, self.peer, self.source, self.target, strips, holds_core)
        dist.barrier(group=fabric.group)
        copied = copies.run(beside or (lambda: None), record=True)
        return copied.spans, copied.busy


def copy_seconds(pull: Pull, size: int, rounds: int, row_bytes: int | None = None) -> float:
    """The core time of one copy on an engine at memory speed."""
    count = 8
    return everywhere(
        pull.fabric, quartile([pull(size, count, row_bytes)[1] / count for _ in range(rounds)])
    )


def queued_seconds(pull: Pull, rounds: int) -> float:
    """The seconds between a copy and the next one in the queue."""
    gaps: list[float] = []
    for _ in range(rounds):
        spans, _ = pull(4096, 16)
        gaps += [after[0] - before[1] for before, after in pairwise(spans)]
    return everywhere(pull.fabric, quartile(gaps))


class Paced(NamedTuple):
    """The effect of engines on paced links on the core that they share with compute."""

    nap: float  # core time of one sleep and wake-up of a `dma` engine
    slice: float  # how long a thread keeps the core while a spinning engine waits for it


def paced_copies(fabric: Fabric, turn: float, rounds: int) -> Paced:
    """Copies on a slow link, in turns of `turn` seconds. Restores the link at the end."""
    before, pull = fabric.link, Pull(fabric)
    bandwidth, turns = 1e8, 10
    size = int(bandwidth * turn)
    naps: list[float] = []
    stretches: list[float] = []
    at_once = copy_seconds(pull, size, rounds)
    try:
        fabric.set_link(Link(bandwidth))
        for _ in range(rounds):
            _, busy = pull(size, turns)
            naps.append(busy / turns - at_once)
            pull(
                size * turns,
                2,
                holds_core=True,
                beside=lambda: stretches.extend(_stretches(20 * turn)),
            )
    finally:
        fabric.set_link(before)
    # Other processes can only shorten a stretch, so the long ones are whole slices.
    whole = sorted(stretches)[9 * len(stretches) // 10] if stretches else 0.0
    return Paced(max(0.0, everywhere(fabric, quartile(naps))), everywhere(fabric, whole))


def _stretches(seconds: float) -> list[float]:
    """How long an engine of this process had this thread's core each time, during the next
    `seconds`. The time of other processes does not count."""
    stretches: list[float] = []
    until, last = time.perf_counter() + seconds, 0.0
    while time.perf_counter() < until:
        theirs = time.process_time() - time.thread_time()
        if last and theirs - last > AWAY:
            stretches.append(theirs - last)
        last = theirs
    return stretches


def permute_seconds(fabric: Fabric, size: int, rounds: int) -> float:
    """The seconds of copying a region within the rank, right after its source was written."""
    source, target = torch.ones(size // 4), torch.empty(size // 4)
    run = lambda: target.copy_(source)  # noqa: E731
    repeat = _repeats(run)
    return everywhere(fabric, quartile([_mean(run, repeat) for _ in range(rounds)]))


def signal_seconds(fabric: Fabric, rounds: int) -> float:
    """The seconds from a signal until a spinning peer sees it: half of a round trip."""
    if fabric.world == 1:
        return 0.0
    samples = []
    for _ in range(rounds):
        dist.barrier(group=fabric.group)
        seconds = round_trip(fabric)
        if seconds is not None:
            samples.append(seconds / 2.0)
    own = torch.tensor(quartile(samples) if samples else 0.0, dtype=torch.float64)
    dist.broadcast(own, dist.get_global_rank(fabric.group, 0), group=fabric.group)
    return own.item()


def decision_seconds(fabric: Fabric, rounds: int) -> float:
    """The seconds of reading counters and choosing the next GEMM, with half of the chunks ready."""
    operation = AllGatherMatmul.of(64, 16, 16, 2)
    tasks = operation.lower(Schedule.parse("adaptive:16@dma")).tasks
    loose = [t for t in tasks if isinstance(t, Matmul) and t.merge is not None and t.rank == 0]

    def decide() -> None:
        look_at_counters(fabric, len(loose))
        merged(largest_run(loose[::2]))

    return everywhere(fabric, quartile([_mean(decide, 20) for _ in range(rounds)]))


class CallTimes(NamedTuple):
    """The costs of a call beyond its GEMMs and bytes."""

    call: float  # entering, agreeing, finishing
    task: float  # each further task of the compute lane
    wake: float  # from a signal until the engine, or compute that waits for one, runs


def call_seconds(fabric: Fabric, rounds: int) -> CallTimes:
    """Measures tiny calls with few and many tasks, with and without engines."""
    few, many, size = 1, 32, 16
    x = fabric.memory.empty((many, size), torch.float32)
    x.fill_(1.0)
    w = torch.ones(size, size)
    out = torch.empty(fabric.world * many, size)
    names = (f"hetero-unfused-1d:{few}@direct", f"hetero-unfused-1d:{many}@direct", "serial@dma")
    samples: dict[str, list[float]] = {name: [] for name in names}
    before = fabric.link
    try:
        fabric.set_link(Link())
        for number in range(-2, rounds):
            for name in names:
                dist.barrier(group=fabric.group)
                start = time.perf_counter()
                all_gather_matmul(x, w, schedule=name, out=out, group=fabric.group)
                seconds = time.perf_counter() - start
                if number >= 0:
                    samples[name].append(seconds)
    finally:
        fabric.set_link(before)
    short, long, serial = (everywhere(fabric, quartile(samples[name])) for name in names)
    tiny = everywhere(fabric, _mean(lambda: torch.mm(x, w, out=out[:many]), 50))
    tasks = max(fabric.world - 1, 1)
    task = max(0.0, (long - short) / ((many - few) * tasks) - tiny)
    call = max(0.0, short - (1 + few * tasks) * (task + tiny))
    return CallTimes(call, task, max(0.0, (serial - call - task - tiny) / 2.0))
