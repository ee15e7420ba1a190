"""Ranks that are stopped or interrupted: a stopped rank is only slow, an interrupt ends a wait."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from ranks import check_call
from surviving import WITHIN, check_survivors, quick_call, warm_up

import weft
from weft import PeerLost


def test_a_stopped_rank_is_only_slow(fresh_ranks):
    pool = fresh_ranks(3)
    pool.run(warm_up)
    job = pool.start(many_checked_calls, 60)
    for _ in range(3):
        time.sleep(0.1)
        os.kill(pool.pids[1], signal.SIGSTOP)
        time.sleep(0.4)
        os.kill(pool.pids[1], signal.SIGCONT)
    job.values()


def many_checked_calls(count: int) -> None:
    for number in range(count):
        check_call(30, 5, 8, seed=number, schedule="adaptive@dma")
        time.sleep(0.02)


def interrupted(schedule: str) -> float:
    """Waits for a rank that does not come, until this process gets a SIGINT."""
    moment = []

    def interrupt() -> None:
        moment.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(0.4, interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        check_call(8, 3, 4, schedule=schedule)
    took = time.monotonic() - moment[0]
    with pytest.raises(weft.Error, match="KeyboardInterrupt"):
        check_call(8, 3, 4, schedule=schedule)
    return took


@pytest.mark.parametrize("schedule", ["adaptive@dma", "adaptive@direct"])
def test_an_interrupt_ends_a_wait_at_once(fresh_ranks, schedule):
    pool = fresh_ranks(2)
    pool.run(warm_up)
    [took] = pool.start(interrupted, schedule, only=[0]).values()
    assert took < WITHIN
    [other] = pool.start(quick_call, schedule, only=[1]).outcomes()
    assert isinstance(other.error, PeerLost), "the other rank hears that this one gave up"
    check_survivors(pool, [0, 1])


def interrupted_in_the_middle(schedule: str, symmetric: bool) -> str:
    """One rank is interrupted in a long call; the other must finish it or hear of it soon."""
    rank = dist.get_rank()
    weft.configure(link="0.1MB/s" if rank == 0 else "memory")  # twenty seconds
    shard = weft.symmetric_empty(500, 1000) if symmetric else torch.empty(500, 1000)
    shard.fill_(1.0)
    dist.barrier()
    if rank == 0:
        threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()
    started = time.monotonic()
    try:
        weft.all_gather_matmul(shard, torch.ones(1000, 8), schedule=schedule)
        said = "done"
    except KeyboardInterrupt:
        said = "interrupted"
    except PeerLost:
        said = "lost"
    assert time.monotonic() - started < 0.4 + WITHIN
    return said


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("schedule", ["adaptive@dma", "serial@cores", "adaptive@direct"])
def test_an_interrupt_in_the_middle_of_a_call(renewed_ranks, schedule, symmetric):
    pool = renewed_ranks(2)
    pool.run(warm_up)
    first, second = pool.run(interrupted_in_the_middle, schedule, symmetric)
    assert first == "interrupted"
    assert second in ("done", "lost")


def interrupted_inside(operator: str, schedule: str, ends: bool) -> str:
    """Rank 1 is interrupted in a call of ten seconds, in which rank 0 waits for what it sends."""
    rank = dist.get_rank()
    weft.configure(link="0.1MB/s")
    x, w = torch.ones(1000, 8), torch.ones(8, 500)
    dist.barrier()
    if rank == 1:
        threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()
    started = time.monotonic()
    try:
        getattr(weft, operator)(x, w, schedule=schedule)
        said = "done"
    except KeyboardInterrupt:
        if ends:
            os._exit(0)
        said = "interrupted"
    except PeerLost as lost:
        said = f"lost rank {lost.rank}"
    assert time.monotonic() - started < 0.4 + WITHIN
    return said


@pytest.mark.parametrize("ends", [False, True], ids=["goes on", "ends"])
@pytest.mark.parametrize(
    ("operator", "schedule"),
    [
        ("matmul_reduce_scatter", "adaptive@direct"),
        ("matmul_reduce_scatter", "adaptive@dma"),
        ("matmul_all_reduce", "adaptive@dma"),
        ("matmul_all_reduce", "in-kernel"),
    ],
)
def test_peers_hear_of_an_interrupt_before_their_deadline(fresh_ranks, operator, schedule, ends):
    pool = fresh_ranks(2)
    pool.run(warm_up)
    first, second = pool.start(interrupted_inside, operator, schedule, ends).outcomes()
    assert first.value == "lost rank 1", first.trace
    assert second.died if ends else second.value == "interrupted", second.trace


def interrupted_twice() -> None:
    """A second interrupt comes while rank 0 still writes for its peers why it gives up."""
    check_call(8, 3, 4)
    dist.barrier()
    if dist.get_rank() == 0:
        fabric = weft.fabric.of()

        def interrupted_again(call, error):
            raise KeyboardInterrupt

        fabric.reach.leave_word = interrupted_again
        with pytest.raises(KeyboardInterrupt):
            fabric.give_up(weft.Error("rank 0 was interrupted"))
        with pytest.raises(weft.Error, match="rank 0 was interrupted"):
            check_call(8, 3, 4)
        return
    began = time.monotonic()
    with pytest.raises(PeerLost) as lost:
        check_call(8, 3, 4)
    assert lost.value.rank == 0
    assert time.monotonic() - began < WITHIN


@pytest.mark.parametrize("fabric", ["auto", "flat"])
def test_a_second_interrupt_does_not_keep_the_group_alive(fresh_ranks, fabric):
    fresh_ranks(2, WEFT_FABRIC=fabric).run(interrupted_twice)


def given_up_without_a_trace() -> None:
    """What keeps a group that has failed alive is the caller's exception, and nothing else."""
    gc.collect()
    gc.disable()
    group = dist.new_group()
    check_call(8, 3, 4, group=group)
    fabric = weakref.ref(weft.fabric.of(group))
    dist.barrier()
    if dist.get_rank() == 0:
        weft.fabric.of(group).give_up(weft.Error("enough"))
    else:
        with suppress(PeerLost):
            check_call(8, 3, 4, group=group)
    dist.barrier()
    dist.destroy_process_group(group)
    del group
    check_call(8, 3, 4)  # closes the fabrics of destroyed groups
    gone = fabric() is None
    gc.enable()
    assert gone


@pytest.mark.parametrize("fabric", ["auto", "flat"])
def test_a_failed_group_is_freed_without_the_garbage_collector(fresh_ranks, fabric):
    fresh_ranks(2, WEFT_FABRIC=fabric).run(given_up_without_a_trace)
