"""Bad luck: ranks that die, never come, leave, stop or are interrupted. Nobody hangs, nothing is
left behind, and the survivors can go on in a new group."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import check_call, integers, product, shard_of, tell

import weft
from weft import PeerLost, Timeout

WITHIN = 4.0
"""Seconds after the death of a rank in which every other rank must know: a twentieth is usual, and
a machine that is busy with other things may take long. Calls last ten times as long, and deadlines
five times, so that nothing but hearing of it can end them in time."""


def long_call(schedule: str, options: dict | None = None) -> None:
    """A call that takes forty seconds: 4 MB from every peer over a slow link."""
    weft.configure(link="0.1MB/s")
    tell("calling")
    weft.all_gather_matmul(
        torch.ones(1000, 1000), torch.ones(1000, 8), schedule=schedule, **(options or {})
    )


def warm_up() -> list[str]:
    """Makes the group's fabric, and says what is open now."""
    check_call(8, 3, 4, schedule="adaptive@dma")
    return open_files()


def open_files() -> list[str]:
    """What the file descriptors of this process point to."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue
    return sorted(found)


def survive(port: int, members: list[int]) -> list[str]:
    """The survivors form a new group and call there; gives the open files afterwards."""
    rank = members.index(dist.get_rank())
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, None, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(members))
    for name in ("adaptive@dma", "adaptive@direct", "serial@cores"):
        check_call(9, 4, 6, schedule=name)
    gc.collect()  # errors that were caught hold the old group in their traces
    return open_files()


def check_survivors(pool, members: list[int]) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    job = pool.start(survive, store.port, members, only=members)
    for files in job.values():
        assert sum("memfd:weft" in file for file in files) == 1, "the old heap is closed"
        assert sum("pidfd" in file for file in files) <= len(members)


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
    outcomes = job.outcomes(within=30)
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
    lost = job.outcomes(within=30)[0]
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
    outcomes = job.outcomes(within=30)
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


def test_a_rank_that_died_between_calls(fresh_ranks):
    pool = fresh_ranks(2)
    pool.run(warm_up)
    pool.kill(1)
    pool.start(call_again, only=[0]).values(within=10)


# -- a rank does not come --------------------------------------------------------------------------


def quick_call(schedule: str) -> None:
    check_call(8, 3, 4, schedule=schedule)


def wait_alone(deadline: float, schedule: str) -> tuple[str, float]:
    weft.configure(deadline=deadline)
    started = time.monotonic()
    with pytest.raises(Timeout) as late:
        check_call(8, 3, 4, schedule=schedule)
    return str(late.value), time.monotonic() - started


@pytest.mark.parametrize("schedule", ["adaptive@dma", "adaptive@direct", "serial@cores"])
def test_a_rank_never_calls(fresh_ranks, schedule):
    pool = fresh_ranks(3)
    pool.run(warm_up)
    job = pool.start(wait_alone, 0.6, schedule, only=[0, 2])
    for message, seconds in job.values(within=20):
        assert "rank 1 to enter the call" in message
        assert "call 2" in message
        assert "0.6 s" in message
        assert schedule in message
        assert 0.6 <= seconds < 0.6 + WITHIN
    [late] = pool.start(quick_call, schedule, only=[1]).outcomes(within=20)
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
    [seconds] = pool.start(first_call_alone, only=[0]).values(within=30)
    assert 0.9 <= seconds < 1 + WITHIN
    [late] = pool.start(check_call, 8, 3, 4, only=[1]).outcomes(within=30)
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
    [heard] = job.outcomes(within=20)
    assert heard.at - left < WITHIN, heard.trace
    assert "rank 1 left" in heard.value or "rank 1 died" in heard.value


def destroy() -> None:
    dist.destroy_process_group()


def test_a_rank_destroys_the_group_while_another_waits(fresh_ranks):
    pool = fresh_ranks(2)
    pool.run(warm_up)
    job = pool.start(lost_or_late, only=[0])
    job.hear("calling")
    time.sleep(0.1)
    pool.start(destroy, only=[1]).values()
    assert job.values(within=20) == [True]


def lost_or_late() -> bool:
    weft.configure(deadline=1)
    tell("calling")
    with pytest.raises((PeerLost, Timeout), match="rank 1"):
        check_call(8, 3, 4)
    return True


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
        outcomes = pool.start(last_call, slow, schedule).outcomes(within=30)
        assert outcomes[slow].error is None, outcomes[slow].trace
        assert not outcomes[slow].died
        assert outcomes[1 - slow].died  # ended in good order, and so gave no answer


# -- a rank is stopped or interrupted --------------------------------------------------------------


def test_a_stopped_rank_is_only_slow(fresh_ranks):
    pool = fresh_ranks(3)
    pool.run(warm_up)
    job = pool.start(many_checked_calls, 60)
    for _ in range(3):
        time.sleep(0.1)
        os.kill(pool.pids[1], signal.SIGSTOP)
        time.sleep(0.4)
        os.kill(pool.pids[1], signal.SIGCONT)
    job.values(within=60)


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
    [took] = pool.start(interrupted, schedule, only=[0]).values(within=20)
    assert took < WITHIN
    [other] = pool.start(quick_call, schedule, only=[1]).outcomes(within=20)
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
    first, second = pool.start(interrupted_inside, operator, schedule, ends).outcomes(within=30)
    assert first.value == "lost rank 1", first.trace
    assert second.died if ends else second.value == "interrupted", second.trace
