"""Probes of this machine, which all ranks of a group run at once: neighbours slow each other, so a
rank by itself would see a machine that no schedule ever has to itself.

What a thread does by itself is timed by the time that it had a core, so that other processes which
take the core away do not count. Probes take many samples in turns and give the lower quartile: what
the machine does undisturbed, without betting on the single luckiest sample.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist

from weft.fabric import HostFabric, Link, _native
from weft.ops.all_gather_matmul import all_gather_matmul
from weft.plan.adaptive import largest_run, merged
from weft.plan.all_gather_matmul import AllGatherMatmul
from weft.plan.tasks import Matmul
from weft.schedule import Schedule

POOL = 8 << 20
"""Bytes that copies walk over: more than a core's own cache, as the shards of a real call are."""
AWAY = 2e-4
"""A thread that does nothing but look at clocks has lost its core if it sees this much pass."""
WARM = 1e-3
"""A GEMM is repeated until a sample takes this long: chunks of one call find W in the cache."""


class Gemm(NamedTuple):
    """One GEMM to time."""

    dtype: str
    m: int
    n: int
    k: int


def quartile(samples: Sequence[float]) -> float:
    """The lower quartile."""
    return sorted(samples)[(len(samples) - 1) // 4]


def everywhere(fabric: HostFabric, seconds: float) -> float:
    """The mean over all ranks of the group; collective."""
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, group=fabric.group)
    return value.item() / fabric.world


def gemm_seconds(
    fabric: HostFabric,
    points: Sequence[Gemm],
    rounds: int,
    budget: float,
    report: Callable[[float], None],
) -> dict[Gemm, float]:
    """Seconds of every GEMM with all ranks at work; the points take turns.

    So many rounds, or fewer once they have taken `budget` seconds, but no less than two.
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
    # One thread by itself has no lucky samples: the least is what the machine does undisturbed.
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
    """Seconds of this thread on its core, for each of so many runs after one that warms up."""
    if repeat > 1:
        run()
    start = time.thread_time()
    for _ in range(repeat):
        run()
    return (time.thread_time() - start) / repeat


class Pull:
    """Copies by this rank's own engine: out of the next rank's memory, or within its own."""

    def __init__(self, fabric: HostFabric, local: bool = False) -> None:
        self.fabric = fabric
        self.source = fabric.symmetric_empty((POOL,), torch.uint8)
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
        """`count` copies of `size` bytes, queued behind each other: (start, end) of each, and the
        seconds that the engine had a core for them. `beside` is called once they are under way;
        without it this thread sleeps. Collective."""
        fabric, native = self.fabric, self.fabric.native
        row, pitch = (size, size) if row_bytes is None else (row_bytes, 4 * row_bytes)
        rows = size // row
        program, span = _native.Program(), pitch * rows
        for number in range(count):
            offset = number * span % (POOL - span + 1)
            here = (self.peer, 1 if self.peer == fabric.rank else 0, offset, pitch)
            there = (fabric.rank, 0, offset, pitch)
            program.add(self.peer, number, holds_core, here, there, rows, row, [], number, [])
        call, deadline = fabric.next_call(), fabric.deadline_ns()
        dist.barrier(group=fabric.group)
        native.enter(call, 0, [native.offset_of(self.source.data_ptr())], b"")
        fabric.wait(lambda: native.agree(call, [], deadline), "calibrate", "the ranks")
        pointers = [self.target.data_ptr(), self.source.data_ptr()]
        start, own = time.process_time(), time.thread_time()
        flight = native.launch(program, call, deadline, pointers, [0] * fabric.world, True)
        if beside is not None:
            beside()
        fabric.wait(lambda: native.finish(flight), "calibrate", "the copies")
        busy = time.process_time() - start - (time.thread_time() - own)
        native.done(call)
        fabric.wait(lambda: native.wait_released(call, deadline), "calibrate", "the ranks")
        return sorted((begin / 1e9, end / 1e9) for _, begin, end in flight.spans), busy


def copy_seconds(pull: Pull, size: int, rounds: int, row_bytes: int | None = None) -> float:
    """Seconds of a core for one copy on an engine at memory speed."""
    count = 8
    return everywhere(
        pull.fabric, quartile([pull(size, count, row_bytes)[1] / count for _ in range(rounds)])
    )


def queued_seconds(pull: Pull, rounds: int) -> float:
    """Seconds between a copy and the one queued right behind it."""
    gaps: list[float] = []
    for _ in range(rounds):
        spans, _ = pull(4096, 16)
        gaps += [after[0] - before[1] for before, after in pairwise(spans)]
    return everywhere(pull.fabric, quartile(gaps))


class Paced(NamedTuple):
    """What engines on paced links do to the core that they share with compute."""

    nap: float  # seconds of the core for one sleep and wake-up of a `dma` engine
    slice: float  # how long a thread keeps the core while a spinning engine wants it too


def paced_copies(fabric: HostFabric, turn: float, rounds: int) -> Paced:
    """Copies on a slow link, in turns of so many seconds; at the end the link is as it was."""
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
    # Other processes can only cut a stretch short, so the long ones are whole slices.
    whole = sorted(stretches)[9 * len(stretches) // 10] if stretches else 0.0
    return Paced(max(0.0, everywhere(fabric, quartile(naps))), everywhere(fabric, whole))


def _stretches(seconds: float) -> list[float]:
    """For how long an engine of this process had this thread's core, each time, in the next so many
    seconds; what other processes took does not count."""
    stretches: list[float] = []
    until, last = time.perf_counter() + seconds, 0.0
    while time.perf_counter() < until:
        theirs = time.process_time() - time.thread_time()
        if last and theirs - last > AWAY:
            stretches.append(theirs - last)
        last = theirs
    return stretches


def permute_seconds(fabric: HostFabric, size: int, rounds: int) -> float:
    """Seconds of moving a region within the rank, its source just written."""
    source, target = torch.ones(size // 4), torch.empty(size // 4)
    run = lambda: target.copy_(source)  # noqa: E731
    repeat = _repeats(run)
    return everywhere(fabric, quartile([_mean(run, repeat) for _ in range(rounds)]))


def signal_seconds(fabric: HostFabric, rounds: int) -> float:
    """Seconds from a signal to a spinning peer that has seen it: half of there and back."""
    if fabric.world == 1:
        return 0.0
    native, program, samples = fabric.native, _native.Program(), []
    for _ in range(rounds):
        call = fabric.next_call()
        dist.barrier(group=fabric.group)
        native.enter(call, 0, [], b"")
        flight = native.launch(program, call, fabric.deadline_ns(), [], [], False)
        if fabric.rank == 0:
            native.wait(flight, 1, 0)
            start = time.perf_counter()
            native.signal(call, 0, [])
            native.wait(flight, 1, 1)
            samples.append((time.perf_counter() - start) / 2.0)
        elif fabric.rank == 1:
            native.signal(call, 0, [])
            native.wait(flight, 0, 0)
            native.signal(call, 1, [])
        native.done(call)
    own = torch.tensor(quartile(samples) if samples else 0.0, dtype=torch.float64)
    dist.broadcast(own, dist.get_global_rank(fabric.group, 0), group=fabric.group)
    return own.item()


def decision_seconds(fabric: HostFabric, rounds: int) -> float:
    """Seconds of looking at counters and choosing what to multiply next, half of them arrived."""
    operation = AllGatherMatmul.of(64, 16, 16, 2)
    tasks = operation.lower(Schedule.parse("adaptive:16@dma")).tasks
    loose = [t for t in tasks if isinstance(t, Matmul) and t.merge is not None and t.rank == 0]
    counters = [(fabric.rank, number) for number in range(len(loose))]

    def decide() -> None:
        fabric.native.doorbell()
        fabric.native.reached(fabric.call, counters)
        merged(largest_run(loose[::2]))

    return everywhere(fabric, quartile([_mean(decide, 20) for _ in range(rounds)]))


class CallTimes(NamedTuple):
    """What calls cost beyond their GEMMs and bytes."""

    call: float  # entering, agreeing, finishing
    task: float  # each further task of the compute lane
    wake: float  # an engine, or compute waiting for one: from the signal to running


def call_seconds(fabric: HostFabric, rounds: int) -> CallTimes:
    """Tiny calls with few and many tasks, with and without engines."""
    few, many, size = 1, 32, 16
    x = fabric.symmetric_empty((many, size), torch.float32)
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
