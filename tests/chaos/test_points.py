"""Chaos by enumeration: at every point at which a rank waits for its peers or informs them, it is
killed, stopped and then killed, or interrupted. Its peers name it within two seconds; none of them
needs its deadline.

`make chaos` does all of it. `make test` kills and interrupts at every point, and stops at those
whose turn it is today.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import network_points
import pytest
import torch.distributed as dist
from scenarios import ALL, SCENARIOS, prepare, repeat, todays

from weft import PeerLost, fabric
from weft.fabric import _native

NATIVE = Path(__file__).parents[2] / "native"

VICTIM = 1

CASES = [(name, point) for name, scenario in SCENARIOS.items() for point in scenario.points]
WITHIN = 2.0 if ALL else 4.0
"""Seconds after the end of a rank in which its peers must know: two, and in `make test` as much
again, for a machine that is busy with other work. The deadline is far longer."""

# -- that the enumeration is complete --------------------------------------------------------------

INFORMS = re.compile(
    r"\.set\((?:call|to)|\bcounters\[[^]]*\]\.set\(|value\.store\(|stamp\.store\(|(?<!void )"
    r"\bheap(?:_->|\.)wait\(|(?<!Channel::)\bawait\(job|bell\.sleep\("
)
"""What waits for a peer or informs it, in the code of a call."""
PAUSES = re.compile(r"\b(?:spin|sleep)_until\(")
"""What waits for a link. It may share its point with the wait beside it."""
WAITS = {NATIVE / name for name in ("signal.h", "heap.cpp", "channel_layout.h", "channel_wait.h")}
"""How ranks wait: the points are where that is used."""
WITHOUT = {
    "of(rank_).failed.value.store(std::max<uint64_t>(1, number_));": "after an error",
    "of(rank_).failed.value.store(std::max<uint64_t>(1, job.number));": "after an error",
    "bell.sleep(std::max<int64_t>(1, until - now_ns()), [&] {": "between messages",
}


def test_every_wait_and_every_signal_has_a_point():
    """One that is added without a point of its own is noticed here."""
    without = []
    for file in sorted({*NATIVE.glob("*.cpp"), *NATIVE.glob("*.h")} - WAITS):
        point = None
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if "come_to(Point::" in line:
                point = line
            elif line == "}":  # the end of a function
                point = None
            elif (informs := INFORMS.search(line) or PAUSES.search(line)) and (
                line.strip() not in WITHOUT
            ):
                if point is None:
                    without.append(f"{file.name}:{number}: {line.strip()}")
                if informs.re is INFORMS:
                    point = None
    assert without == []


def test_every_point_is_in_a_scenario_and_in_the_code():
    assert {point for _, point in CASES} == {*_native.POINTS, *network_points.POINTS}
    code = "".join(file.read_text() for file in NATIVE.glob("*.cpp"))
    assert sorted(re.findall(r"come_to\(Point::(\w+)\)", code)) == sorted(_native.POINTS)


# -- what peers see --------------------------------------------------------------------------------


def go(name: str, point: str, number: int) -> str:
    """Repeats a scenario. The victim sends itself a signal at a point, once a call was made."""
    scenario, rank = SCENARIOS[name], dist.get_rank()
    if point in network_points.POINTS and rank == VICTIM:
        network_points.watch()
    prepare(scenario)
    scenario.call()
    try:
        if rank == VICTIM:
            set_trap(point, number)
        repeat(name)
    except PeerLost as lost:
        with pytest.raises(PeerLost) as again:  # of every further call
            scenario.call()
        assert again.value.rank == lost.rank  # noqa: PT017
        raise
    except KeyboardInterrupt:
        if fabric.of().broken is None:
            os._exit(0)  # it came between two calls, and ends the rank as it would end a script
        return "interrupted"
    finally:
        set_trap(None, 0)
    return "came through"


def set_trap(point: str | None, number: int) -> None:
    """Has this process send itself a signal when it comes to a point; None: at none."""
    native = _native.POINTS.index(point) if point in _native.POINTS else -1
    _native.set_trap(native, 1, number)
    network_points.set_trap(point if point in network_points.POINTS else None, number)


def start(fresh_ranks, name: str, point: str, number: int):
    scenario = SCENARIOS[name]
    pool = fresh_ranks(scenario.world, **scenario.environment)
    return pool, pool.start(go, name, point, number)


def check(outcomes, since: float | None = None) -> None:
    """That the others have named the victim, soon after its end."""
    victim = outcomes.pop(VICTIM)
    assert victim.value != "came through", "the scenario does not come to the point"
    assert victim.error is None, victim.trace
    for other in outcomes:
        assert isinstance(other.error, PeerLost), other
        assert other.error.rank == VICTIM
        assert other.at - (victim.at if since is None else since) < WITHIN


@pytest.mark.parametrize(("name", "point"), CASES)
def test_a_rank_is_killed_at_a_point(fresh_ranks, name, point):
    _, job = start(fresh_ranks, name, point, signal.SIGKILL)
    outcomes = job.outcomes()
    assert outcomes[VICTIM].died
    check(outcomes)


@pytest.mark.parametrize(("name", "point"), CASES)
def test_a_rank_is_interrupted_at_a_point(fresh_ranks, name, point):
    _, job = start(fresh_ranks, name, point, signal.SIGINT)
    check(job.outcomes())


def is_stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] == "T"


@pytest.mark.parametrize(("name", "point"), todays(CASES))
def test_a_rank_is_stopped_and_then_killed_at_a_point(fresh_ranks, name, point):
    pool, job = start(fresh_ranks, name, point, signal.SIGSTOP)
    until = time.monotonic() + 20
    while not is_stopped(pool.pids[VICTIM]):
        assert time.monotonic() < until, "the scenario does not come to the point"
        time.sleep(0.01)
    time.sleep(0.2)  # its peer sleeps by now, and only waits
    killed = pool.kill(VICTIM)
    check(job.outcomes(), killed)
