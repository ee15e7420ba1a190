"""What one rank does: bursts of random calls that it compares, and reports about them.

The calls of a burst follow from its seed alone: which function, sizes, dtype, schedule and group.
Delays are each rank's own.
"""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from weft import fabric as fabrics
from weft.errors import Error, PeerLost
from weft.measure.soak import (  # noqa: F401 - they register
    collective_subjects,
    expert_subjects,
    float8_subjects,
    operator_subjects,
)
from weft.measure.soak.subjects import Draw, Subject, right, subjects
from weft.schedule import Schedule

DELAYED = 0.04
"""The share of calls before which a rank waits for a few milliseconds."""
KINDS = 40
"""The number of different calls of a burst, of which most calls are one: so plans are also found
again."""


@dataclass(frozen=True)
class Usage:
    """What a process holds."""

    resident: int
    files: int
    threads: int


@dataclass
class Said:
    """A rank's report about a burst. lost: the rank of a PeerLost, in the numbers of the whole
    group; first, last: when the first call had ended, and the last, or the error was raised."""

    calls: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    error: str = ""
    lost: int | None = None
    first: float = 0.0
    last: float = 0.0
    usage: Usage | None = None


class Groups:
    """The groups of a rank: all ranks, two that overlap, and two of all ranks for two threads."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.rank, world = dist.get_rank(), dist.get_world_size()
        everyone = list(range(world))
        self.members = [everyone]
        if world > 2:
            self.members += [everyone[:-1], everyone[1:]]
        made = [dist.new_group(ranks) for ranks in self.members[1:]]
        self.some: list[dist.ProcessGroup | None] = [None, *made]
        self.threads = [dist.new_group(everyone) for _ in range(2)]
        # On one stream, the order of the threads' calls would have to be that of all ranks.
        self.streams: list[AbstractContextManager[object]] = [
            nullcontext() if device == "cpu" else torch.Stream(device) for _ in self.threads
        ]


def burst(groups: Groups, seed: int, count: int, kind: str) -> Said:
    """Makes random calls. kind: `all` on all groups, `whole` on the group of all ranks, `threads`
    in two threads with a group each."""
    said = Said()
    try:
        if kind == "threads":
            _in_threads(groups, seed, count, said)
        elif kind == "whole":
            _calls(groups, [None], [groups.members[0]], seed, count, said)
        else:
            _calls(groups, groups.some, groups.members, seed, count, said)
    except Error as error:
        said.last = time.monotonic()
        said.error = f"{type(error).__name__}: {error}"
        said.lost = error.rank if isinstance(error, PeerLost) else None
    gc.collect()
    said.usage = usage()
    return said


def usage() -> Usage:
    """What this process holds now."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    files, threads = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
    return Usage(pages * os.sysconf("SC_PAGE_SIZE"), files, threads)


def _calls(
    groups: Groups,
    some: Sequence[dist.ProcessGroup | None],
    members: Sequence[Sequence[int]],
    seed: int,
    count: int,
    said: Said,
) -> None:
    shared, own = random.Random(seed), random.Random(f"{seed} {groups.rank}")
    known = subjects()
    kinds = [(shared.choice(list(known)), shared.randrange(2**31)) for _ in range(KINDS)]
    for number in range(count):
        name, case = shared.choice(kinds)
        at, choice = shared.randrange(len(some)), shared.random()
        if groups.rank not in members[at]:
            continue
        subject, group, world = known[name], some[at], len(members[at])
        rank = members[at].index(groups.rank)
        if own.random() < DELAYED:
            time.sleep(own.random() * 0.005)
        # The first call of a group opens its fabric, which may fail as any call may.
        can = fabrics.of(group, groups.device).can
        able = _able(subject, world, can, groups.device)
        if not able:
            continue
        schedule = able[int(choice * len(able))]
        draw = Draw(case, world, subject.dtypes, groups.device)
        result = subject.call(draw, rank, group, schedule).cpu()
        fabrics.check(group)  # a call on a device may return before it fails
        said.last = time.monotonic()
        said.first = said.first or said.last
        said.calls[name] += 1
        if not right(subject, draw, rank, result):
            said.wrong.append(
                f"{name}, {schedule}, {world} ranks, case {case}: rank {rank} has another result "
                f"than plain torch in call {number} of the burst {seed}"
            )


def _able(subject: Subject, world: int, can: fabrics.Capabilities, device: str) -> list[str]:
    """The schedules of a function that a fabric can carry out. On a device, collectives are for
    copy engines, and no kernel stores into the memory of peers."""
    known = subject.schedules(world)
    if device != "cpu":
        refused = "cores" if subject.collective else "in-kernel"
        return [schedule for schedule in known if not schedule.startswith(refused)]
    if subject.collective and not can.collectives:
        return []
    return [schedule for schedule in known if can.direct or not _direct(schedule)]


def _direct(schedule: str) -> bool:
    try:
        return schedule != "auto" and Schedule.parse(schedule).engine == "direct"
    except Error:  # the way of a collective, or a strategy
        return False


def _in_threads(groups: Groups, seed: int, count: int, said: Said) -> None:
    """The same in two threads, each with a group of its own."""
    reports, errors = [Said(), Said()], list[BaseException]()

    def work(place: int) -> None:
        try:
            torch.set_num_threads(1)
            group = groups.threads[place]
            members = [groups.members[0]]
            with groups.streams[place]:
                _calls(groups, [group], members, 2 * seed + place, count // 2, reports[place])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for report in reports:
        said.calls += report.calls
        said.wrong += report.wrong
    said.first = min((r.first for r in reports if r.first), default=0.0)
    said.last = max(r.last for r in reports)
    if errors:
        raise errors[0]
