"""This machine, as the choice of a schedule sees it: calibrated once, or a default description."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from weft.errors import Unsupported
from weft.fabric import Fabric
from weft.fabric.link import Link
from weft.machine import Machine, load

calibrator: Callable[[Fabric], Machine] | None = None
"""Describes this machine with the ranks of a group, in at most two seconds, and keeps the result;
collective. Set by whoever can: measuring is the business of a layer above this one."""


def must_calibrate() -> bool:
    """Whether this machine has no description yet, and may be measured for one."""
    if calibrator is None or os.environ.get("WEFT_CALIBRATE", "1") == "0":
        return False
    try:
        load("cpu")
    except Unsupported:
        return True
    return False


def calibrate(fabric: Fabric) -> Machine:
    """Describes this machine; all ranks of the group call it."""
    assert calibrator is not None, "rank 0 asks for it only where there is one"
    return calibrator(fabric)


def description() -> Machine:
    """This machine as calibrated, or as machines of its kind are."""
    if os.environ.get("WEFT_CALIBRATE", "1") != "0":
        try:
            return load("cpu")
        except Unsupported:
            pass
    return default()


@lru_cache(maxsize=1)
def default() -> Machine:
    """The description that stands in where there was no calibration."""
    return load(Path(__file__).with_name("host.toml"))


@lru_cache(maxsize=256)
def with_link(machine: Machine, link: Link) -> Machine:
    """The machine with a group's links: as they are, or paced."""
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
