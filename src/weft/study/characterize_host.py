"""Measures the losses of `weft.study.characterization` on this host, with real GEMMs and copies.

There are two ranks, each with one compute thread on its own core. Copies use a paced link on which
gathering A would take as long as the GEMM, and continue until the GEMM has ended. Arms take turns
in every round, so that a slow moment of the machine affects all of them equally. The figures are
lower quartiles over the rounds, which show the undisturbed machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil

import torch
import torch.distributed as dist

from weft.dtype import ITEM_BYTES
from weft.fabric import Fabric, Link, of
from weft.fabric.host.probe import EngineCopies, Strip
from weft.measure.launch import Report, launch
from weft.measure.stopping import stop_asked
from weft.study.characterization import (
    CUTS,
    DRIVERS,
    LONGER,
    Character,
    Characterization,
    pieces_of,
    shapes_of,
)
from weft.study.scenarios import Shape

GRID = ((512, 2048), (128, 512), (256, 1024))
"""M, N and K on one rank."""
WORLD = 2
REPEAT = 7
WARM_UP = 2
SAMPLE = 10e-3
"""A GEMM is repeated until a sample takes this long. A shorter sample would end before the
operating system lets an engine run that needs the same core."""
COPIES = 16
"""The number of copies that together take as long as a sample alone."""

Arm = Callable[[], float]
"""Runs once on all ranks and returns the seconds of this rank's GEMMs."""


def characterize_host(
    shapes: Sequence[Shape] | None = None,
    repeat: int = REPEAT,
    report: Report | None = None,
    stop: str | None = None,
) -> Characterization:
    """Measures the losses of shapes (default: `GRID`) on this host. stop: the path of a file that
    ends it after a shape, from `stopping.stop_file`."""
    shapes = shapes_of(GRID, "float32") if shapes is None else shapes
    found: list[Character] = launch(WORLD, _measure, list(shapes), repeat, stop, report=report)[0]
    title = f"this host, {WORLD} ranks of one thread"
    return Characterization("cpu", title, True, tuple(found))


def _measure(report: Report, shapes: list[Shape], repeat: int, stop: str | None) -> list[Character]:
    fabric = of(None)
    characters = []
    for number, shape in enumerate(shapes):
        if number and stop_asked(stop):
            break
        report(number / len(shapes), shape.label)
        arms, times = _arms(fabric, shape)
        samples = _rounds(arms, repeat)
        taken = {name: sorted(values)[(repeat - 1) // 4] for name, values in samples.items()}
        whole = taken["whole"]
        characters.append(
            Character(
                shape,
                whole / times,
                {(axis, n): taken[f"{axis}{n}"] / whole - 1.0 for axis, n in CUTS},
                {engine: taken[engine] / whole - 1.0 for engine in DRIVERS},
            )
        )
    return characters


def _rounds(arms: dict[str, Arm], repeat: int) -> dict[str, list[float]]:
    """The seconds of every arm in every round, of the slowest rank. Collective."""
    names = list(arms)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-WARM_UP, repeat):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            dist.barrier()
            seconds = arms[name]()
            if number >= 0:
                samples[name].append(seconds)
    own = torch.tensor([samples[name] for name in names], dtype=torch.float64)
    dist.all_reduce(own, dist.ReduceOp.MAX)
    return {name: row.tolist() for name, row in zip(names, own, strict=True)}


def _arms(fabric: Fabric, shape: Shape) -> tuple[dict[str, Arm], int]:
    """What takes turns for a shape, and how many GEMMs a sample of each has."""
    dtype: torch.dtype = getattr(torch, shape.dtype)
    random = torch.Generator().manual_seed(fabric.rank)
    a = torch.randn(shape.m, shape.k, generator=random).to(dtype)
    b = torch.randn(shape.k, shape.n, generator=random).to(dtype)
    c = torch.empty(shape.m, shape.n, dtype=dtype)

    def whole() -> None:
        torch.mm(a, b, out=c)

    def rows(pieces: int) -> None:
        for start, length in pieces_of(shape.m, pieces):
            torch.mm(a[start : start + length], b, out=c[start : start + length])

    def columns(pieces: int) -> None:
        for start, length in pieces_of(shape.k, pieces):
            left, right = a[:, start : start + length], b[start : start + length]
            if start:
                c.addmm_(left, right)
            else:
                torch.mm(left, right, out=c)

    def repeated(times: int, function: Callable[..., None], *arguments: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            function(*arguments)
        return time.perf_counter() - start

    once = torch.tensor(min(repeated(1, whole) for _ in range(5)), dtype=torch.float64)
    dist.all_reduce(once, dist.ReduceOp.MAX)
    alone = once.item()
    times = ceil(SAMPLE / alone)
    sample = partial(repeated, times, whole)
    arms: dict[str, Arm] = {"whole": sample}
    for axis, pieces in CUTS:
        function = rows if axis == "m" else columns
        arms[f"{axis}{pieces}"] = partial(repeated, times, function, pieces)
    gathered = times * shape.m * shape.k * ITEM_BYTES[shape.dtype] // fabric.world
    link = Link(gathered / (times * alone))
    for engine in DRIVERS:
        arms[engine] = _beside(fabric, sample, gathered, link, engine == "cores")
    return arms, times


def _beside(fabric: Fabric, sample: Arm, num_bytes: int, link: Link, holds_core: bool) -> Arm:
    """A sample while this rank's engine pulls from the other rank over a paced link."""
    size = max(1, num_bytes // COPIES)
    source = fabric.memory.empty((size * COPIES,), torch.uint8)
    source.fill_(1)
    target = torch.empty(size * COPIES, dtype=torch.uint8)
    strips = [
        Strip(number % COPIES * size, 1, size, size) for number in range(round(LONGER * COPIES))
    ]
    peer = (fabric.rank + 1) % fabric.world
    copies = EngineCopies(fabric, peer, source, target, strips, holds_core)

    def run() -> float:
        fabric.set_link(link)
        return copies.run(sample).beside

    return run
