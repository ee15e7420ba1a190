"""Deadlines: which numbers can be one, and that an infinite one is none at all."""

from __future__ import annotations

import math
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import check_call, on_weft, tell

import weft
from weft import PeerLost, Unsupported
from weft.fabric import deadlines

WRONG = (0, -1, -math.inf, math.nan, 1e11, 1e300, 10**400, "soon", None, [1.0])


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_a_deadline(wrong):
    with pytest.raises(Unsupported, match="must be a number of seconds above zero") as refused:
        deadlines.seconds_of(wrong, "deadline")
    assert "\n" not in str(refused.value)


def test_what_can_be_a_deadline():
    for right in (1e-9, 1, "2.5", 1e9, math.inf, "inf", "Infinity"):
        seconds = deadlines.seconds_of(right, "deadline")
        assert seconds == float(right)
        assert 0 < deadlines.nanoseconds(seconds) <= deadlines.FOREVER_NS
    assert deadlines.nanoseconds(timedelta.max.total_seconds()) == deadlines.FOREVER_NS


def configured(wrong) -> None:
    for number in wrong:
        with pytest.raises(Unsupported, match="deadline must be a number of seconds"):
            weft.configure(deadline=number)
        check_call(8, 3, 4)
    weft.configure(deadline=math.inf)
    calls()


def calls() -> None:
    """Every kind of call, with no deadline."""
    for schedule in ("adaptive@dma", "serial@cores", "auto"):
        check_call(8, 3, 4, schedule=schedule)
    for _ in range(3):
        weft.matmul_all_reduce(torch.ones(4, 64), torch.ones(64, 600))
    shard = weft.symmetric_empty(4, 4).fill_(1.0)
    weft.all_gather_matmul(shard, torch.ones(4, 2), schedule="serial@dma")


def collectives() -> None:
    x = torch.ones(1000)
    weft.all_reduce(x, out=x)
    assert weft.all_reduce(x, async_op=True).wait(math.inf)[0] == 4
    weft.all_gather(x, async_op=True).wait()


def messages() -> None:
    weft.configure(deadline=math.inf)
    x = torch.full((3,), 5.0)
    if dist.get_rank() == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
    assert x.tolist() == [5.0] * 3


def test_a_deadline_can_be_set_to_none(renewed_ranks):
    pool = renewed_ranks(2)
    pool.run(configured, [wrong for wrong in WRONG if wrong is not None])
    pool.run(collectives)


def lost_without_a_deadline() -> None:
    tell("calling")
    with pytest.raises(PeerLost, match="rank 1 died"):
        check_call(8, 3, 4)


@pytest.mark.parametrize("fabric", ["auto", "flat"])
def test_no_deadline_from_the_first_call_on(fresh_ranks, fabric):
    pool = fresh_ranks(2, WEFT_DEADLINE="inf", WEFT_FABRIC=fabric)
    pool.run(calls)
    if fabric == "auto":
        pool.run(on_weft, collectives)
        pool.run(on_weft, messages)
        pool.run(calls)
    job = pool.start(lost_without_a_deadline, only=[0])
    job.hear("calling")
    killed = pool.kill(1)
    [heard] = job.outcomes()
    assert heard.error is None, heard.trace
    assert heard.at - killed < 10


def refused_on_every_rank() -> None:
    with pytest.raises(Unsupported, match="WEFT_DEADLINE must be a number of seconds"):
        check_call(8, 3, 4)


@pytest.mark.parametrize("text", ["1e11", "nan", "-3", "a while"])
def test_a_wrong_variable(fresh_ranks, text):
    fresh_ranks(2, WEFT_DEADLINE=text).run(refused_on_every_rank)
