"""Calibration: measures this machine and describes it for the simulator.

`calibrate` starts ranks, `here` uses an existing group. Both return the Machine that
`weft.machine.load` loads by its name (`cpu`, or `cpu-8-threads`) after `keep` has saved it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist

from weft.errors import Unsupported
from weft.fabric import Fabric, of
from weft.machine import Machine, calibrated
from weft.measure import probes
from weft.measure.describe import MEBIBYTE, TURN, Figures, describe, to_toml
from weft.measure.launch import Report, launch
from weft.measure.probes import Gemm

YARDSTICK = Gemm("float32", 256, 256, 256)
"""A GEMM that later runs repeat, to see whether the machine is as fast as during calibration."""

LARGEST = 1 << 30
"""Multiplications of the largest GEMM. Larger ones have the same rate and only take longer."""


@dataclass(frozen=True)
class Level:
    """How thorough a calibration is."""

    name: str
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    inner: tuple[int, ...]
    rounds: int
    seconds: float  # time limit for the rounds of GEMMs
    few: int  # rounds of probes that are fast and stable
    other_dtypes: tuple[tuple[int, int, int], ...]

    @property
    def points(self) -> list[Gemm]:
        shapes = product(self.rows, self.columns, self.inner)
        points = [Gemm("float32", m, n, k) for m, n, k in shapes if m * n * k <= LARGEST]
        others = ("float64", "bfloat16", "float16")
        points += [Gemm(dtype, *shape) for dtype in others for shape in self.other_dtypes]
        return list(dict.fromkeys([*points, YARDSTICK]))


FULL = Level(
    "full",
    (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
    (64, 256, 1024, 4096),
    (64, 256, 1024, 4096),
    rounds=9,
    seconds=45.0,
    few=40,
    other_dtypes=tuple(product((4, 64), (128, 512), (128, 512))),
)
QUICK = Level(
    "quick", (1, 8, 24, 64, 256), (64, 256, 1024), (64, 256, 1024), 3, 0.8, 8, ((32, 256, 256),)
)
LEVELS = {level.name: level for level in (QUICK, FULL)}


def calibrate(level: Level = FULL, report: Report | None = None, threads: int = 1) -> Machine:
    """Starts ranks with so many compute threads on all cores, but at least two, and measures."""
    cores = len(os.sched_getaffinity(0))
    if threads > 1 and 2 * threads > cores:
        raise Unsupported(
            f"two ranks of {threads} threads need {2 * threads} cores, and this process may use"
            f" {cores}; take fewer threads"
        )
    world = max(2, cores // threads)
    machines: list[Machine] = launch(world, _on_rank, level, threads=threads, report=report)
    return machines[0]


def _on_rank(report: Report, level: Level) -> Machine:
    return here(of(None), level, report)


def here(fabric: Fabric, level: Level, report: Report | None = None) -> Machine:
    """Measures with the ranks of a group. Collective; all ranks return the same machine."""
    with fabric.lock:
        figures = [measure(fabric, level, report or (lambda share, text: None))]
    dist.broadcast_object_list(
        figures, src=dist.get_global_rank(fabric.group, 0), group=fabric.group
    )
    return describe(figures[0])


def measure(fabric: Fabric, level: Level, report: Report) -> Figures:
    """Runs every probe. Collective."""
    few = level.few
    report(0.0, "copies")
    pull = probes.Pull(fabric)
    remote = probes.copy_seconds(pull, MEBIBYTE, few)
    strided = probes.copy_seconds(pull, MEBIBYTE, few, row_bytes=1024)
    queued = probes.queued_seconds(pull, few)
    local = probes.copy_seconds(probes.Pull(fabric, local=True), MEBIBYTE, few)
    report(0.05, "calls")
    calls = probes.call_seconds(fabric, few)
    signal = probes.signal_seconds(fabric, few)
    decision = probes.decision_seconds(fabric, few)
    permute = probes.permute_seconds(fabric, MEBIBYTE, few)
    small = probes.permute_seconds(fabric, 4096, few)
    report(0.1, "paced copies")
    paced = probes.paced_copies(fabric, TURN, max(2, few // 8))
    gemms = probes.gemm_seconds(
        fabric,
        level.points,
        level.rounds,
        level.seconds,
        lambda share: report(0.2 + 0.8 * share, "GEMMs"),
    )
    return Figures(
        gemms,
        remote,
        local,
        strided,
        queued,
        permute,
        small,
        signal,
        decision,
        calls,
        paced,
        _num_cores(fabric),
        torch.get_num_threads(),
    )


def keep(machine: Machine, level: Level, target: Path | None = None) -> Path:
    """Writes the description to the place where `load` looks for its name, or to `target`."""
    return calibrated.write(target or calibrated.path(machine.name), to_toml(machine, level.name))


def _num_cores(fabric: Fabric) -> int:
    """The number of cores that the ranks of the group use."""
    sets: list[set[int]] = [set()] * fabric.world
    dist.all_gather_object(sets, os.sched_getaffinity(0), group=fabric.group)
    return len(set.union(*sets))
