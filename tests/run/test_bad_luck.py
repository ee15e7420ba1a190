"""Bad luck: ranks that die, never come or leave. Nobody hangs, nothing is left behind, and the
survivors can go on in a new group."""

from __future__ import annotations

import ctypes
import os
import platform
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import check_call, integers, product, shard_of, tell
from surviving import WITHIN, check_survivors, quick_call, warm_up

import weft
from weft import PeerLost, Timeout


def long_call(schedule: str, options: dict | None = None) -> None:
    """A call that takes forty seconds: 4 MB from every peer over a slow link."""
    weft.configure(link="0.1MB/s")
    tell("calling")
    weft.all_gather_matmul(
        torch.ones(1000, 1000), torch.ones(1000, 8), schedule=schedule, **(options or {})
    )


# -- a rank dies -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("adaptive@dma", {}),
        ("adaptive@cores", {}),
        ("adaptive:4@direct", {}),
        ("serial@dma", {}),
        ("shard-p2p@cores", {}),
        ("hetero-fused-1d@dma", {}),
        ("adaptive@direct", {"return_gathered": True}),
    ],
)
def test_a_rank_is_killed_in_the_middle_of_a_call(fresh_ranks, schedule, options):
    pool = fresh_ranks(3)
    pool.run(warm_up)
    job = pool.start(long_call, schedule, options)
    job.hear("calling")
    time.sleep(0.1)  # all are in the call by now
    killed = pool.kill(1)
    outcomes = job.outcomes()
    assert outcomes[1].died
    for rank in (0, 2):
        error = outcomes[rank].error
        assert isinstance(error, PeerLost), outcomes[rank]
        assert error.rank == 1
        assert "rank 1 died" in str(error)
        assert outcomes[rank].at - killed < WITHIN
    check_survivors(pool, [0, 2])


def steady_call(schedule: str) -> None:
    """A call of eight seconds in which a chunk arrives every sixteen milliseconds."""
    weft.configure(link="1MB/s")
    tell("calling")
    weft.all_gather_matmul(torch.ones(4000, 500), torch.ones(500, 2), schedule=schedule)


@pytest.mark.parametrize(
    "schedule", ["adaptive:500@dma", "adaptive:500@cores", "hetero-unfused-1d:500@direct"]
)
def test_a_rank_is_killed_while_its_bytes_keep_coming(fresh_ranks, schedule):
    """The memory of a dead rank can still be read, and this call waits for nothing else of it: the
    survivor is never idle, and must look after its peer all the same."""
    pool = fresh_ranks(2)
    pool.run(warm_up)
    job = pool.start(steady_call, schedule)
    job.hear("calling")
    time.sleep(0.3)  # chunks arrive by now
    killed = pool.kill(1)
    lost = job.outcomes()[0]
    assert isinstance(lost.error, PeerLost), lost
    assert "rank 1 died" in str(lost.error)
    assert lost.at - killed < WITHIN


def many_calls(seconds: float) -> None:
    until = time.monotonic() + seconds
    w = torch.ones(16, 4)
    x = torch.ones(8, 16)
    tell("calling")
    while time.monotonic() < until:
        weft.all_gather_matmul(x, w, schedule="adaptive@dma")


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_is_killed_among_quick_calls(fresh_ranks, victim):
    """At any moment of a call or between two: the others name the one that died, not each other."""
    pool = fresh_ranks(3)
    pool.run(warm_up)
    job = pool.start(many_calls, 20.0)
    job.hear("calling")
    time.sleep(0.1)
    killed = pool.kill(victim)
    outcomes = job.outcomes()
    for rank in {0, 1, 2} - {victim}:
        assert isinstance(outcomes[rank].error, PeerLost), outcomes[rank]
        assert outcomes[rank].error.rank == victim, str(outcomes[rank].error)
        assert outcomes[rank].at - killed < WITHIN


def call_again() -> None:
    with pytest.raises(PeerLost, match="rank 1"):
        check_call(8, 3, 4)
    with pytest.raises(PeerLost, match="this group is over") as again:
        check_call(8, 3, 4)
    assert "form a new group" in str(again.value)
    assert again.value.rank == 1


def test_a_rank_that_died_between_calls(fresh_ranks):
    pool = fresh_ranks(2)
    pool.run(warm_up)
    pool.kill(1)
    began = time.monotonic()
    [heard] = pool.start(call_again, only=[0]).outcomes()
    assert heard.error is None, heard.trace
    assert heard.at - began < WITHIN


# -- a rank does not come --------------------------------------------------------------------------


def wait_alone(deadline: float, schedule: str) -> tuple[str, float]:
    """A call to which rank 1 does not come; the others are ready for it together."""
    weft.configure(deadline=deadline)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"ready {dist.get_rank()}", "")
    store.wait(["ready 0", "ready 2"])
    started = time.monotonic()
    with pytest.raises(Timeout) as late:
        check_call(8, 3, 4, schedule=schedule)
    return str(late.value), time.monotonic() - started


@pytest.mark.parametrize("schedule", ["adaptive@dma", "adaptive@direct", "serial@cores"])
def test_a_rank_never_calls(fresh_ranks, schedule):
    pool = fresh_ranks(3)
    pool.run(warm_up)
    job = pool.start(wait_alone, 0.8, schedule, only=[0, 2])
    for message, seconds in job.values():
        assert "rank 1 to enter the call" in message
        assert "call 2" in message
        assert "0.8 s" in message
        assert schedule in message
        assert 0.8 <= seconds < 0.8 + WITHIN
    [late] = pool.start(quick_call, schedule, only=[1]).outcomes()
    assert isinstance(late.error, PeerLost)
    assert "gave up in call 2" in str(late.error)
    check_survivors(pool, [0, 1, 2])


def first_call_alone() -> float:
    started = time.monotonic()
    with pytest.raises(Timeout, match="rank 1"):
        check_call(8, 3, 4)
    return time.monotonic() - started


def try_again() -> None:
    """Together the ranks can open the group after all."""
    os.environ["WEFT_DEADLINE"] = "20"
    check_call(8, 3, 4)


def test_a_rank_never_makes_its_first_call(fresh_ranks):
    pool = fresh_ranks(2, WEFT_DEADLINE="1")
    [seconds] = pool.start(first_call_alone, only=[0]).values()
    assert 0.9 <= seconds < 1 + WITHIN
    [late] = pool.start(check_call, 8, 3, 4, only=[1]).outcomes()
    assert isinstance(late.error, weft.Error)
    assert "rank 0 gave up" in str(late.error)
    pool.run(try_again)


def too_short_a_deadline(schedule: str) -> str:
    weft.configure(deadline=0.5)
    started = time.monotonic()
    with pytest.raises(Timeout) as late:
        long_call(schedule)
    assert time.monotonic() - started < 0.5 + WITHIN
    return str(late.value)


@pytest.mark.parametrize("schedule", ["adaptive@dma", "serial@cores", "hetero-unfused-1d@direct"])
def test_a_deadline_shorter_than_the_call(renewed_ranks, schedule):
    pool = renewed_ranks(2)
    pool.run(warm_up)
    for rank, message in enumerate(pool.run(too_short_a_deadline, schedule)):
        assert f"rank {rank} waited 0.5 s" in message
        assert schedule in message


def overwrite_after_a_timeout() -> str:
    """Rank 0 gives up early and overwrites its symmetric input, which rank 1 still reads."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    weft.configure(link="2MB/s", deadline=0.5 if rank == 0 else 20)
    shard = weft.symmetric_empty(1000, 500)
    shard.fill_(rank + 1.0)
    dist.barrier()
    try:
        y = weft.all_gather_matmul(shard, torch.ones(500, 2), schedule="serial@dma")
    except weft.Error as error:
        shard.fill_(torch.nan)
        if rank == 0:
            store.wait(["rank 1 is through"], timedelta(seconds=30))
        return type(error).__name__
    finally:
        if rank == 1:
            store.set("rank 1 is through", "")
    return "right" if (y[:1000] == 500).all() and (y[1000:] == 1000).all() else "wrong"


def test_a_rank_that_gave_up_spoils_no_other_result(fresh_ranks):
    pool = fresh_ranks(2)
    pool.run(warm_up)
    first, second = pool.run(overwrite_after_a_timeout)
    assert first == "Timeout"
    assert second in ("right", "PeerLost")


# -- a rank leaves ---------------------------------------------------------------------------------


def leave() -> None:
    raise SystemExit


def lost_with_a_reason() -> str:
    tell("calling")
    with pytest.raises(PeerLost) as lost:
        check_call(8, 3, 4)
    assert lost.value.rank == 1
    return str(lost.value)


def test_a_rank_ends_while_another_waits(fresh_ranks):
    pool = fresh_ranks(2)
    pool.run(warm_up)
    job = pool.start(lost_with_a_reason, only=[0])
    job.hear("calling")
    time.sleep(0.1)
    pool.start(leave, only=[1])
    left = time.monotonic()
    [heard] = job.outcomes()
    assert heard.at - left < WITHIN, heard.trace
    assert "rank 1 left" in heard.value or "rank 1 died" in heard.value


def dies_slowly() -> None:
    """Ends the main thread alone, as if the others of a process that was killed took their time."""
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    exit_thread = {"x86_64": 60, "aarch64": 93}[platform.machine()]
    ctypes.CDLL(None).syscall(exit_thread, 0)


def test_a_rank_that_is_still_dying_is_named(fresh_ranks):
    pool = fresh_ranks(2)
    pool.run(warm_up)
    job = pool.start(lost_with_a_reason, only=[0])
    job.hear("calling")
    began = time.monotonic()
    pool.start(dies_slowly, only=[1])
    [heard] = job.outcomes()
    assert "rank 1 died" in heard.value, heard.trace
    assert heard.at - began < WITHIN
    assert pool.processes[1].is_alive()
    pool.kill(1)


def destroy() -> None:
    dist.destroy_process_group()


def test_a_rank_destroys_the_group_while_another_waits(fresh_ranks):
    pool = fresh_ranks(2)
    pool.run(warm_up)
    job = pool.start(lost_with_a_reason, only=[0])
    job.hear("calling")
    pool.start(destroy, only=[1]).values()
    left = time.monotonic()
    [heard] = job.outcomes()
    assert "rank 1 left" in heard.value, heard.trace
    assert heard.at - left < WITHIN


def destroyed_with_work_in_background() -> None:
    """What a rank started before it destroyed the group goes on, also without its handle."""
    rank = dist.get_rank()
    if rank == 0:
        handle = weft.all_reduce(torch.arange(5.0), async_op=True)
        weft.broadcast(torch.arange(7.0), async_op=True)
        destroy()
        tell("destroyed")
        assert torch.equal(handle.wait(), 2 * torch.arange(5.0))
    else:
        assert torch.equal(weft.all_reduce(torch.arange(5.0)), 2 * torch.arange(5.0))
        assert torch.equal(weft.broadcast(torch.zeros(7)), torch.arange(7.0))
        with pytest.raises(PeerLost, match="rank 0 left"):
            weft.all_reduce(torch.ones(3))


def test_a_destroyed_group_ends_its_background_work_first(fresh_ranks):
    pool = fresh_ranks(2)
    pool.run(warm_up)
    job = pool.start(destroyed_with_work_in_background, only=[0])
    job.hear("destroyed")
    pool.start(destroyed_with_work_in_background, only=[1]).values()
    job.values()


MADE: list[dist.ProcessGroup] = []
"""Groups of this rank, from one function of a test to the next."""


def make_groups(backend: str) -> None:
    MADE[:] = [dist.new_group(backend=backend), dist.new_group()]
    for group in MADE[:1]:
        weft.all_reduce(torch.ones(2), group=group)


def destroyed_while_it_runs(then: str) -> None:
    group, other = MADE
    MADE.clear()
    rank, ones = dist.get_rank(), torch.ones(1_000_000)
    handles = [weft.all_reduce(ones, group=group, async_op=True) for _ in range(4)]
    if rank == 0:
        dist.destroy_process_group(group)
        del group
        tell("destroyed")
    if then == "another group":
        weft.all_reduce(torch.ones(3), group=other)
    for handle in handles:
        assert torch.equal(handle.wait(), 2 * ones)


@pytest.mark.parametrize("then", ["nothing", "another group"])
@pytest.mark.parametrize("backend", ["gloo", "weft"])
def test_a_group_that_is_destroyed_while_it_runs(fresh_ranks, backend, then):
    pool = fresh_ranks(2)
    pool.run(make_groups, backend)
    job = pool.start(destroyed_while_it_runs, then, only=[0])
    job.hear("destroyed")
    time.sleep(0.1)  # so that rank 0 is about to look up the other group, or waits
    pool.start(destroyed_while_it_runs, then, only=[1]).values()
    job.values()


def last_call(slow: int, schedule: str) -> None:
    """A rank that is done ends at once; the other still reads its memory."""
    weft.configure(link="1MB/s" if dist.get_rank() == slow else "memory")
    x, w = integers((200, 500), torch.float32, 1), integers((500, 2), torch.float32, 2)
    y = weft.all_gather_matmul(shard_of(x), w, schedule=schedule)
    assert torch.equal(y, product(x, w))
    if dist.get_rank() != slow:
        raise SystemExit


@pytest.mark.parametrize("schedule", ["adaptive@dma", "adaptive@direct", "serial@cores"])
def test_a_rank_may_end_right_after_its_last_call(fresh_ranks, schedule):
    for slow in (0, 1):
        pool = fresh_ranks(2)
        pool.run(warm_up)
        outcomes = pool.start(last_call, slow, schedule).outcomes()
        assert outcomes[slow].error is None, outcomes[slow].trace
        assert not outcomes[slow].died
        assert outcomes[1 - slow].died  # ended in good order, and so gave no answer
