"""Turns the results of the probes into a Machine, and a Machine into a commented file."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from weft.fabric.host.probe import MOST_RANKS
from weft.machine import (
    Compute,
    CopyEngines,
    Cores,
    DeviceMemory,
    HostCores,
    Launch,
    Links,
    Machine,
    Measured,
    Protocol,
    Saturation,
    calibrated,
)
from weft.measure.probes import CallTimes, Gemm, Paced

Array = npt.NDArray[np.float64]

TURN, TURN_BYTES = 2e-3, 16 << 10
"""The longest sleep and the fewest bytes of a step of a paced transfer, as in native/links.h."""
GRACE = 3e-3
"""How late an engine may start its next transfer without a gap on its link (native/engine.cpp)."""


MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Figures:
    """The results of the probes, in seconds and shares."""

    gemms: dict[Gemm, float]
    remote_copy: float  # 1 MiB
    local_copy: float
    strided_copy: float  # 1 MiB in rows of 1 KiB
    queued: float
    permute: float  # 1 MiB
    small_permute: float  # 4 KiB
    signal: float
    decision: float
    calls: CallTimes
    paced: Paced
    num_cores: int
    threads: int = 1  # of a rank


def describe(figures: Figures) -> Machine:
    """The machine with these figures. All ranks are busy, and each has a core for every compute
    thread."""
    remote, local = MEBIBYTE / figures.remote_copy, MEBIBYTE / figures.local_copy
    rates = {g: 2.0 * g.m * g.n * g.k / seconds for g, seconds in figures.gemms.items()}
    peaks = {g.dtype: max(r for p, r in rates.items() if p.dtype == g.dtype) for g in rates}
    single = [g for g in rates if g.dtype == "float32"]
    saturation, rate = fit_saturation(single, [rates[g] for g in single])
    reached = {dtype: rate * peak / peaks["float32"] for dtype, peak in peaks.items()}
    moved = 2.0 * (MEBIBYTE - 4096) / max(figures.permute - figures.small_permute, 1e-9)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores, calls = figures.num_cores, figures.calls
    threads = figures.threads
    ranks_of = "" if threads == 1 else f", ranks of {threads} threads"
    return Machine(
        name=calibrated.name(threads),
        title=f"{_processor()}, {cores} cores{ranks_of}",
        compute=Compute(
            units=1,
            clock=_clock(),
            loaded_clock=_clock(),
            peak={dtype: max(peaks[dtype], reached[dtype]) for dtype in peaks},
            rate=reached,
            sustained_share=1.0,
            sustained_after=1.0,
            saturation=saturation,
            measured=tuple(Measured(g.dtype, g.m, g.n, g.k, r) for g, r in rates.items()),
        ),
        memory=DeviceMemory(
            capacity=total * min(1.0, threads / cores),
            peak_bandwidth=moved,
            bandwidth=moved,
            latency=0.0,
            unit_bandwidth=moved,
            cache_bytes=_cache_bytes(),
            cache_bandwidth=moved,
            crowding=0.0,
            crowding_units=1,
        ),
        links=Links("mesh", MOST_RANKS, remote, remote, remote * MOST_RANKS, 0.0),
        engines=CopyEngines(
            count=MOST_RANKS,
            bandwidth=remote,
            local_bandwidth=local,
            command=0.0,
            schedule=calls.wake,
            packet=0.0,
            next_packet=figures.queued,
            row=max(0.0, figures.strided_copy - figures.remote_copy) / (MEBIBYTE // 1024 - 1),
            release=calls.wake,
            completion=calls.wake,
            collective=0.0,
            collective_completion=calls.wake,
            broadcast_share=0.5,
            swap_share=0.5,
            memory_bytes_per_byte=1.0,
        ),
        launch=Launch(
            host=calls.call,
            kernel=calls.task,
            gap=0.0,
            signal=figures.signal,
            poll=0.0,
            decision=figures.decision,
        ),
        cores=Cores(
            protocols=(Protocol("copy", max(calls.call, 1e-9), 0.0, remote),),
            all_gather_units=1,
            all_to_all_units=1,
            copy_units=1,
            all_reduce_latency=2.0,
            local_share=1.0,
            memory_bytes_per_byte=1.0,
        ),
        host=HostCores(
            cores=cores,
            threads=threads,
            region=figures.small_permute,
            turn=TURN,
            turn_bytes=TURN_BYTES,
            nap=figures.paced.nap,
            slice=figures.paced.slice,
            grace=GRACE,
        ),
    )


def fit_saturation(points: Sequence[Gemm], rates: Sequence[float]) -> tuple[Saturation, float]:
    """Fits the curve of `cost.rates` to the points, by ratio. Returns the curve and its peak rate.

    In this curve a GEMM costs its multiplications plus passes over B, A and C, which take as long
    as `m` more rows, `n` more columns and `k` more terms. It passes through the largest GEMMs,
    because beyond them there are no points to correct it.
    """
    sizes = np.array([(p.m, p.n, p.k) for p in points], dtype=float)
    target = np.log(np.array(rates))
    candidates = np.concatenate([[0.0], np.geomspace(0.25, 1024.0, 241)])
    half = np.array([8.0, 8.0, 8.0])
    largest = np.argsort(sizes.prod(axis=1))[-3:]

    def residual(values: Array) -> Array:
        found: Array = target + np.log1p(values / sizes).sum(axis=1)
        return found

    def distance(values: Array) -> float:
        found = residual(values)
        return float(((found - found[largest].mean()) ** 2).sum())

    for _ in range(20):
        before = half.copy()
        for axis in range(3):
            tried = np.repeat(half[None], len(candidates), axis=0)
            tried[:, axis] = candidates
            half = tried[int(np.argmin([distance(values) for values in tried]))]
        if np.array_equal(before, half):
            break
    peak = float(np.exp(residual(half)[largest].mean()))
    return Saturation(*(float(value) for value in half)), peak


def to_toml(machine: Machine, level: str) -> str:
    """The description as a commented file."""
    when = datetime.datetime.now().astimezone().date().isoformat()
    here = f"measured here on {when} by weft calibrate"
    absent = "not measured: a host has no such thing"
    seen = "reported by the operating system"
    assert machine.host is not None
    threads = machine.host.threads
    by = "one thread" if threads == 1 else f"{threads} threads"
    sources = {
        "compute": f"{here}: GEMMs by {by} per rank, all ranks at once",
        "compute.units": "a rank counts as one, whatever its threads",
        "compute.clock": seen,
        "compute.loaded_clock": seen,
        "compute.sustained_share": absent,
        "compute.sustained_after": absent,
        "compute.saturation": f"{here}: the curve nearest to all points",
        "memory": f"{here}: a permute of 1 MiB, read and written",
        "memory.capacity": f"{seen}, for each rank",
        "memory.latency": absent,
        "memory.cache_bytes": seen,
        "memory.crowding": absent,
        "memory.crowding_units": absent,
        "links": f"{here}: memory speed, a copy of 1 MiB from another rank",
        "links.topology": "memory is as near to one rank as to another",
        "links.world": "the most ranks that the host fabric takes",
        "links.latency": "memory speed: part of a copy",
        "engines": absent,
        "engines.count": "a thread for every peer",
        "engines.bandwidth": f"{here}: 1 MiB from another rank",
        "engines.local_bandwidth": f"{here}: 1 MiB within a rank",
        "engines.next_packet": f"{here}: between copies queued behind each other",
        "engines.row": f"{here}: 1 MiB in rows of 1 KiB against 1 MiB in one",
        "engines.schedule": f"{here}: tiny calls with engines against without",
        "engines.release": f"{here}: tiny calls with engines against without",
        "engines.completion": f"{here}: tiny calls with engines against without",
        "engines.collective_completion": f"{here}: tiny calls with engines against without",
        "launch": absent,
        "launch.host": f"{here}: a tiny call without its tasks",
        "launch.kernel": f"{here}: one more task in a tiny call, without its GEMM",
        "launch.signal": f"{here}: from one rank to another that spins",
        "launch.poll": "part of launch.signal",
        "launch.decision": f"{here}: 16 counters looked at, 8 chunks chosen from",
        "cores": absent,
        "cores.protocols": f"{here}: a call, and a copy of 1 MiB from another rank",
        "host.nap": f"{here}: core time of copies on a paced link, beyond their bytes",
        "host.slice": f"{here}: for how long a spinning engine keeps compute off the core",
        "host.grace": "native/engine.cpp",
        "host.cores": seen,
        "host.threads": f"a rank measures with {by}",
        "host.region": f"{here}: a permute of 4 KiB",
        "host.turn": "native/links.h",
        "host.turn_bytes": "native/links.h",
    }
    heading = (
        f"This host, as `weft calibrate` ({level}) found it on {when}, with {by} per rank:"
        " seconds, bytes.\n"
        "Machines are described in src/weft/machine/description.py."
    )
    return calibrated.to_toml(machine, heading, sources)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


def _clock() -> float:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("cpu MHz"):
                    return float(line.split(":")[1]) * 1e6
    except (OSError, ValueError):
        pass
    return 1e9


def _cache_bytes() -> float:
    """The bytes of the largest cache of a core."""
    folder = Path("/sys/devices/system/cpu/cpu0/cache")
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = [1 << 20]
    for file in folder.glob("index*/size"):
        text = file.read_text().strip()
        sizes.append(int(text[:-1]) * units.get(text[-1:], 1) if text else 0)
    return float(max(sizes))
