"""How much of this machine other programs used during a measurement, from /proc/stat."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")
_IDLE = (3, 4)
"""The places of idle and iowait in a line of /proc/stat. The last two of ten, guest times, are
counted in user times already."""
SOME = 0.2
"""A machine is busy if others use so many cores more than are left for them."""


@dataclass(frozen=True)
class Moment:
    """Seconds of the cores this process may use, since the machine started: busy and in all; and
    the seconds of this process and its ended children."""

    busy: float
    total: float
    own: float


@dataclass(frozen=True)
class Company:
    """The cores that this process may use, and how many of them other programs used on average."""

    cores: int
    others: float

    def disturbs(self, wanted: int) -> bool:
        """Whether a measurement that keeps `wanted` cores busy had to share them."""
        return self.others > max(0, self.cores - wanted) + SOME


def now() -> Moment | None:
    """None where the system does not say."""
    cores = os.sched_getaffinity(0)
    try:
        lines = STAT.read_text().splitlines()
        ticks = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None
    busy = total = 0.0
    for line in lines:
        name, *numbers = line.split()
        if not name.startswith("cpu") or name == "cpu" or int(name[3:]) not in cores:
            continue
        times = [int(number) / ticks for number in numbers[:8]]
        total += sum(times)
        busy += sum(time for place, time in enumerate(times) if place not in _IDLE)
    own = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        used = resource.getrusage(who)
        own += used.ru_utime + used.ru_stime
    return Moment(busy, total, own) if total else None


def between(before: Moment | None, after: Moment | None) -> Company | None:
    """Who used the cores between two moments; None if that is unknown."""
    if before is None or after is None or after.total <= before.total:
        return None
    cores = len(os.sched_getaffinity(0))
    others = (after.busy - before.busy) - (after.own - before.own)
    return Company(cores, max(0.0, others / (after.total - before.total) * cores))
