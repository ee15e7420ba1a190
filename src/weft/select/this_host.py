"""The description of this machine for the choice of a schedule: calibrated once for each number of
compute threads that ranks have, or a default."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from weft.errors import Unsupported
from weft.fabric import Fabric
from weft.fabric.link import Link
from weft.machine import Machine, calibrated, load

Calibrator = Callable[[Fabric], Machine]
_calibrators: list[Calibrator] = []


def register_calibrator(calibrator: Calibrator) -> Calibrator:
    """Registers the function that describes this machine with the ranks of a group, in at most two
    seconds, and keeps the result. All ranks call it together. It comes from a layer above, because
    this layer cannot measure."""
    _calibrators[:] = [calibrator]
    return calibrator


def must_calibrate(threads: int) -> bool:
    """Whether this machine has no description yet for ranks of so many threads, and calibration is
    allowed."""
    if not _calibrators or os.environ.get("WEFT_CALIBRATE", "1") == "0":
        return False
    try:
        load(calibrated.name(threads))
    except Unsupported:
        return True
    return False


def calibrate(fabric: Fabric) -> Machine:
    """Describes this machine with the threads that its ranks have. All ranks of the group call
    this together."""
    return _calibrators[0](fabric)


def description(threads: int) -> Machine:
    """The calibrated description of this machine, or the default one, for ranks of so many
    threads."""
    if os.environ.get("WEFT_CALIBRATE", "1") != "0":
        try:
            return load(calibrated.name(threads))
        except Unsupported:
            pass
    return default(threads)


@lru_cache(maxsize=16)
def default(threads: int = 1) -> Machine:
    """The default description, for machines that were not calibrated. With more threads, products
    are as many times as fast, and memory up to four times; every thread has a core."""
    one = load(Path(__file__).with_name("host.toml"))
    if threads == 1:
        return one
    compute, memory, host, streams = one.compute, one.memory, one.host, min(threads, 4)
    assert host is not None
    return replace(
        one,
        compute=replace(
            compute,
            peak={dtype: threads * rate for dtype, rate in compute.peak.items()},
            rate={dtype: threads * rate for dtype, rate in compute.rate.items()},
        ),
        memory=replace(
            memory,
            peak_bandwidth=streams * memory.peak_bandwidth,
            bandwidth=streams * memory.bandwidth,
            unit_bandwidth=streams * memory.unit_bandwidth,
            cache_bandwidth=streams * memory.cache_bandwidth,
        ),
        host=replace(host, threads=threads, cores=threads * host.cores),
    )


@lru_cache(maxsize=256)
def with_link(machine: Machine, link: Link) -> Machine:
    """The machine with a group's links: those of the description, or paced ones."""
    links = replace(machine.links, topology=link.topology, latency=link.latency)
    if link.bandwidth is not None:
        # Every link has the rate, and a port of a switch is a link; a mesh has no other limit.
        links = replace(
            links,
            peak_bandwidth=link.bandwidth,
            bandwidth=link.bandwidth,
            total_bandwidth=link.bandwidth * (1 if link.topology == "switch" else links.world),
        )
    return replace(machine, links=links)
