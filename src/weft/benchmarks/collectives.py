"""Compares weft's collectives with those of gloo, MPICH and DeepSpeed, and with a memcpy of the
same bytes.

MPICH is included if mpi4py and mpiexec are found next to this Python, or next to the one in
WEFT_MPI_PYTHON; DeepSpeed's all-reduce over shared memory if this Python, or the one in
WEFT_DEEPSPEED_PYTHON, has it. They run in processes of their own, in turns with weft's. A figure is
the median of the runs, each of which gives the median of its samples; the calls in which weft
chooses how to store into rings come before them. The spread is half the distance between the
fastest and the slowest of weft's runs. Targets are ratios of such medians.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist

from weft.benchmarks import Check, Result, part
from weft.collectives.group_channel import TRIALS
from weft.measure.launch import Report, all_gather_flat, launch
from weft.measure.other_libraries import OtherLibrary, Times, find_deepspeed, find_mpich

WORLDS = (2, 4)
KIB = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
"""KiB of each rank's input."""
KINDS = ("all_gather", "all_reduce", "all_reduce in place", "all_to_all")
ARMS = ("weft", "gloo", "MPICH", "DeepSpeed", "memcpy")
ROUNDS = 5

Medians = dict[str, dict[tuple[str, int], list[float]]]
"""By arm, collective and KiB: the median of each run."""
Rows = list[list[str | float | int | None]]


def run(report: Report) -> Result:
    """2 and 4 ranks, 1 KiB to 64 MiB of each rank's input, fp32."""
    rows: Rows = []
    checks: list[Check] = []
    report(0.0, "looking for MPICH and DeepSpeed")
    found = [find_mpich(), find_deepspeed()]
    libraries = [library for library in found if isinstance(library, OtherLibrary)]
    for number, world in enumerate(WORLDS):
        medians = _measure_world(world, libraries, part(report, number, len(WORLDS)))
        rows += _rows(world, medians)
        if world == 2:
            checks += _checks(medians)
    rows += [[0, why, 0, *[None] * (len(ARMS) + 1)] for why in found if isinstance(why, str)]
    headers = ("ranks", "collective", "KiB", *(f"{arm} us" for arm in ARMS), "spread")
    return Result(headers, rows, checks)


def _measure_world(world: int, libraries: list[OtherLibrary], report: Report) -> Medians:
    medians: Medians = {}

    def keep(arm: str, times: Times) -> None:
        for key, taken in times.items():
            medians.setdefault(arm, {}).setdefault(key, []).append(statistics.median(taken))

    for number in range(ROUNDS):
        here = part(report, number, ROUNDS)
        for arm, times in launch(world, _arms, number == 0, report=here)[0].items():
            keep(arm, times)
        for library in libraries:
            if library.spins and world > len(os.sched_getaffinity(0)):
                continue
            here(0.9, f"{library.name}, {world} ranks")
            keep(library.name, library.measure(world, [(kib, *_amount(kib)) for kib in KIB]))
    return medians


def _amount(kib: int) -> tuple[int, int]:
    """The number of calls per sample, and the number of samples."""
    if kib <= 64:
        return 20, 15
    return (4, 10) if kib <= 1024 else (1, 8 if kib <= 16384 else 3)


def _arms(report: Report, with_gloo: bool) -> Mapping[str, Times]:
    import weft

    world = dist.get_world_size()
    found: dict[str, Times] = {"weft": {}, "memcpy": {}, "gloo": {}}
    for number, kib in enumerate(KIB):
        report(number / len(KIB), f"{world} ranks, {kib} KiB")
        calls, repeat = _amount(kib)
        count = kib * 256
        x, y, z = torch.randn(count), torch.empty(count * world), torch.empty(count)
        whole, both = torch.randn(count * world), torch.zeros(count)
        ours: dict[str, Callable[[], object]] = {
            "all_gather": partial(weft.all_gather, x, out=y),
            "all_reduce": partial(weft.all_reduce, x, out=z),
            "all_reduce in place": partial(weft.all_reduce, both, out=both),
            "all_to_all": partial(weft.all_to_all, x, out=z),
        }
        # The bytes that must be moved: a rank's whole result, from memory to memory.
        bound: dict[str, Callable[[], object]] = {
            "all_gather": partial(y.copy_, whole),
            "all_to_all": partial(z.copy_, x),
        }
        theirs: dict[str, Callable[[], object]] = {
            "all_gather": partial(all_gather_flat, y, x),
            "all_reduce in place": partial(dist.all_reduce, both),
        }
        for call in bound.values():
            call()
        for _ in range(TRIALS + 1):
            for call in ours.values():
                call()

        for _ in range(repeat):
            for arm, functions in (("weft", ours), ("memcpy", bound)):
                for kind, taken in _timed(functions, calls):
                    found[arm].setdefault((kind, kib), []).append(taken)
        for _ in range(repeat if with_gloo else 0):
            for kind, taken in _timed(theirs, 2):
                found["gloo"].setdefault((kind, kib), []).append(taken)
    return found


def _timed(functions: Mapping[str, Callable[[], object]], calls: int) -> list[tuple[str, float]]:
    """The seconds per call of each function, over `calls` calls that all ranks start together."""
    import weft

    together, found = torch.zeros(1), []
    for name, call in functions.items():
        weft.all_reduce(together, out=together)
        started = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((name, (time.perf_counter() - started) / calls))
    return found


def _rows(world: int, medians: Medians) -> Rows:
    def us(arm: str, key: tuple[str, int]) -> float | None:
        runs = medians.get(arm, {}).get(key)
        return None if runs is None else round(statistics.median(runs) * 1e6, 1)

    def spread(key: tuple[str, int]) -> str:
        runs = medians["weft"][key]
        return f"{50 * (max(runs) - min(runs)) / statistics.median(runs):.0f} %"

    return [
        [world, kind, kib, *(us(arm, (kind, kib)) for arm in ARMS), spread((kind, kib))]
        for kind in KINDS
        for kib in KIB
    ]


def _checks(medians: Medians) -> list[Check]:
    times = {
        arm: {key: statistics.median(runs) for key, runs in by_key.items()}
        for arm, by_key in medians.items()
    }

    def worst(arm: str, least_kib: int = 1) -> float:
        keys = [key for key in times[arm] if key in times["weft"] and key[1] >= least_kib]
        return max(times["weft"][key] / times[arm][key] for key in keys)

    faster = min(times["gloo"][key] / times["weft"][key] for key in times["gloo"] if key[1] == 1)
    large = "2 ranks, all_gather, all_to_all from 4 MiB: weft / memcpy"
    return [
        Check("2 ranks, 1 KiB: gloo / weft", faster, ">= 10"),
        Check(large, worst("memcpy", 4096), "<= 1.2"),
        *(
            Check(f"2 ranks, 1 KiB to 64 MiB: weft / {name}, worst", worst(name), "<= 1.0")
            for name in ("MPICH", "DeepSpeed")
            if times.get(name)
        ),
    ]
