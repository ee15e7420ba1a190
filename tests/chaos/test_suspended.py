"""A job that is suspended (Ctrl-Z) for longer than its deadline goes on when it is resumed."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from ranks import check_call, tell
from scenarios import SCENARIOS, prepare, todays

import weft

DEADLINE = 3.0
LATE = 1


def wait_in_a_call(call) -> None:
    """Rank 1 is late, so that the others wait for it in the call."""
    tell("calling")
    if dist.get_rank() == LATE:
        time.sleep(0.6)
    call()


def repeats(name: str) -> None:
    prepare(SCENARIOS[name])
    weft.configure(deadline=DEADLINE)
    SCENARIOS[name].call()
    dist.barrier()
    wait_in_a_call(SCENARIOS[name].call)
    SCENARIOS[name].call()


def suspend(pool, job) -> None:
    """Suspends the ranks while they wait for the late one."""
    job.hear("calling")
    time.sleep(0.3)
    pool.suspend(DEADLINE + 1, last=LATE)
    job.values()


QUICK = [name for name in SCENARIOS if "narrow" not in name]
"""Over narrow wires a call takes ten seconds, more than the deadline here."""


@pytest.mark.parametrize("name", todays(QUICK))
def test_a_suspended_job_goes_on(fresh_ranks, name):
    scenario = SCENARIOS[name]
    pool = fresh_ranks(scenario.world, **scenario.environment)
    suspend(pool, pool.start(repeats, name))


def first_call() -> None:
    wait_in_a_call(lambda: check_call(8, 3, 4))


@pytest.mark.parametrize("fabric", ["auto", "flat"])
def test_a_job_that_is_suspended_in_its_first_call_goes_on(fresh_ranks, fabric):
    pool = fresh_ranks(2, WEFT_DEADLINE=str(DEADLINE), WEFT_FABRIC=fabric)
    suspend(pool, pool.start(first_call))


def alone() -> str:
    """A rank that nobody comes to, and that stood still itself, still gives up."""
    check_call(8, 3, 4)
    weft.configure(deadline=DEADLINE)
    dist.barrier()
    if dist.get_rank() == LATE:
        return ""
    tell("calling")
    with pytest.raises(weft.Timeout) as late:
        weft.all_reduce(torch.ones(3))
    return str(late.value)


def test_a_rank_that_stood_still_waits_no_longer_than_its_deadline_after_it(fresh_ranks):
    pool = fresh_ranks(2)
    job = pool.start(alone)
    job.hear("calling")
    os.kill(pool.pids[0], signal.SIGSTOP)
    time.sleep(DEADLINE + 1)
    os.kill(pool.pids[0], signal.SIGCONT)
    resumed = time.monotonic()
    waited, _ = job.outcomes()
    assert "rank 1" in waited.value, waited.trace
    assert waited.at - resumed < DEADLINE + 4
