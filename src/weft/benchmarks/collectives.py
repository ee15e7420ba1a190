"""Compares weft's collectives with those of gloo and MPICH, and with a memcpy of the same bytes.

MPICH is included if mpi4py and mpiexec are found next to this Python, or next to the one in
WEFT_MPI_PYTHON. It runs in processes of its own, in rounds between those of weft and gloo. Every
figure is the median over all rounds.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from weft.benchmarks import Check, Result, part
from weft.measure.launch import Report, all_gather_flat, cores_of, launch

WORLDS = (2, 4)
KIB = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
"""KiB of each rank's input."""
KINDS = ("all_gather", "all_reduce", "all_to_all")
ROUNDS = 5
MPI_SECONDS = 60.0

Times = dict[str, dict[tuple[str, int], float]]

_MPI = """
import json, os, sys, time
import numpy as np
from mpi4py import MPI
comm, out = MPI.COMM_WORLD, {}
os.sched_setaffinity(0, json.loads(sys.argv[2])[comm.rank])
for kib, calls, repeat in json.loads(sys.argv[1]):
    count = kib * 256
    x, y, z = (np.ones(n, np.float32) for n in (count, count * comm.size, count))
    whole = np.ones(count * comm.size, np.float32)
    arms = {"all_gather": lambda: comm.Allgather(x, y), "all_reduce": lambda: comm.Allreduce(x, z),
            "all_to_all": lambda: comm.Alltoall(x, z),
            "bound of all_gather": lambda: np.copyto(y, whole),
            "bound of all_to_all": lambda: np.copyto(z, x)}
    for call in arms.values():
        call()
    for _ in range(repeat):
        for kind, call in arms.items():
            comm.Barrier()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            taken = (time.perf_counter() - start) / calls
            out.setdefault(kind + "," + str(kib), []).append(taken)
if comm.rank == 0:
    print(json.dumps(out))
"""
"""Does the same as `_arms`, on the same cores and in the same order, so that its calls find the
caches in the same state."""


def run(report: Report) -> Result:
    """2 and 4 ranks, 1 KiB to 64 MiB of each rank's input, fp32."""
    rows: list[list[str | float | int | None]] = []
    checks: list[Check] = []
    mpi = _find_mpi()
    for number, world in enumerate(WORLDS):
        times = _measure_world(world, mpi, part(report, number, len(WORLDS)))
        rows += _rows(world, times)
        if world == 2:
            checks += _checks(times, mpi is not None)
    if mpi is None:
        rows.append([0, "MPICH not found: set WEFT_MPI_PYTHON", 0, None, None, None, None])
    headers = ("ranks", "collective", "KiB", "weft us", "gloo us", "MPICH us", "memcpy us")
    return Result(headers, rows, checks)


def _measure_world(world: int, mpi: tuple[str, str] | None, report: Report) -> Times:
    samples: dict[str, dict[tuple[str, int], list[float]]] = {}
    for number in range(ROUNDS):
        here = part(report, number, ROUNDS)
        for arm, values in launch(world, _arms, number == 0, report=here)[0].items():
            for key, taken in values.items():
                samples.setdefault(arm, {}).setdefault(key, []).extend(taken)
        if mpi is not None:
            here(0.9, f"MPICH, {world} ranks")
            for key, taken in _run_mpi(mpi, world).items():
                samples.setdefault("MPICH", {}).setdefault(key, []).extend(taken)
    return {
        arm: {key: statistics.median(taken) for key, taken in values.items()}
        for arm, values in samples.items()
    }


def _amount(kib: int) -> tuple[int, int]:
    """The number of calls per sample, and the number of samples."""
    if kib <= 64:
        return 20, 15
    return (4, 10) if kib <= 1024 else (1, 8 if kib <= 16384 else 3)


def _arms(report: Report, with_gloo: bool) -> Mapping[str, dict[tuple[str, int], list[float]]]:
    import weft

    world = dist.get_world_size()
    found: dict[str, dict[tuple[str, int], list[float]]] = {"weft": {}, "memcpy": {}, "gloo": {}}
    for number, kib in enumerate(KIB):
        report(number / len(KIB), f"{world} ranks, {kib} KiB")
        calls, repeat = _amount(kib)
        count = kib * 256
        x, y, z = torch.randn(count), torch.empty(count * world), torch.empty(count)
        whole = torch.randn(count * world)
        ours: dict[str, Callable[[], object]] = {
            "all_gather": partial(weft.all_gather, x, out=y),
            "all_reduce": partial(weft.all_reduce, x, out=z),
            "all_to_all": partial(weft.all_to_all, x, out=z),
        }
        # The bytes that must be moved: a rank's whole result, from memory to memory.
        bound: dict[str, Callable[[], object]] = {
            "all_gather": partial(y.copy_, whole),
            "all_to_all": partial(z.copy_, x),
        }
        theirs: dict[str, Callable[[], object]] = {
            "all_gather": partial(all_gather_flat, y, x),
            "all_reduce": partial(dist.all_reduce, z),
        }
        for call in (*ours.values(), *bound.values()):
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


def _find_mpi() -> tuple[str, str] | None:
    """(mpiexec, python) with mpi4py, or None."""
    python = os.environ.get("WEFT_MPI_PYTHON", sys.executable)
    beside = Path(python).parent / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        return None
    asked = subprocess.run([python, "-c", "import mpi4py, numpy"], capture_output=True)
    return (mpiexec, python) if asked.returncode == 0 else None


def _run_mpi(mpi: tuple[str, str], world: int) -> dict[tuple[str, int], list[float]]:
    mpiexec, python = mpi
    axes = json.dumps([(kib, *_amount(kib)) for kib in KIB])
    cores = json.dumps([cores_of(rank, world) for rank in range(world)])
    try:
        done = subprocess.run(
            [mpiexec, "-n", str(world), python, "-c", _MPI, axes, cores],
            capture_output=True,
            text=True,
            timeout=MPI_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return {}
    if done.returncode != 0 or not done.stdout.strip():
        return {}
    results: dict[str, list[float]] = json.loads(done.stdout.strip().splitlines()[-1])
    return {(kind, int(kib)): v for key, v in results.items() for kind, kib in [key.split(",")]}


def _rows(world: int, times: Times) -> list[list[str | float | int | None]]:
    def us(arm: str, key: tuple[str, int]) -> float | None:
        seconds = times.get(arm, {}).get(key)
        return None if seconds is None else round(seconds * 1e6, 1)

    return [
        [world, kind, kib, *(us(arm, (kind, kib)) for arm in ("weft", "gloo", "MPICH", "memcpy"))]
        for kind in KINDS
        for kib in KIB
    ]


def _checks(times: Times, with_mpi: bool) -> list[Check]:
    weft = times["weft"]

    def worst(arm: str, kinds: tuple[str, ...], sizes: list[int]) -> float:
        keys = [(kind, kib) for kind in kinds for kib in sizes if (kind, kib) in times[arm]]
        return max(weft[key] / times[arm][key] for key in keys)

    faster = min(times["gloo"][kind, 1] / weft[kind, 1] for kind in KINDS[:2])
    checks = [Check("2 ranks, 1 KiB: gloo / weft", faster, ">= 10")]
    moved = ("all_gather", "all_to_all")
    large = worst("memcpy", moved, [kib for kib in KIB if kib >= 4096])
    checks.append(
        Check("2 ranks, all_gather, all_to_all from 4 MiB: weft / memcpy", large, "<= 1.2")
    )
    if with_mpi and times.get("MPICH"):
        small = worst("MPICH", KINDS, [kib for kib in KIB if kib < 64])
        checks.append(Check("2 ranks, below 64 KiB: weft / MPICH, worst", small, "<= 1.5"))
        rest = worst("MPICH", KINDS, [kib for kib in KIB if kib >= 64])
        checks.append(Check("2 ranks, from 64 KiB: weft / MPICH, worst", rest, "<= 1.0"))
    return checks
