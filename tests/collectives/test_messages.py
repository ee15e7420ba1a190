"""Messages under load: from any rank, in any order, dropped, and with peers that go away."""

from __future__ import annotations

import gc
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import on_weft

import weft


def dropped():
    """Nobody keeps the works, nor the tensors: they live until the messages are through."""
    rank, world = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % world, (rank - 1) % world
    for step in range(12):
        dist.isend(torch.full((400_000,), float(rank + step)), after)
        gc.collect()
        torch.full((400_000,), -1.0)  # takes the place of one that was freed too soon
    time.sleep(0.05)
    for step in range(12):
        got = torch.empty(400_000)
        dist.recv(got, before)
        assert torch.equal(got, torch.full((400_000,), float(before + step)))
    for _ in range(5):
        dist.irecv(torch.empty(300_000), before)  # dropped: the bytes go nowhere, and harm nobody
    gc.collect()
    for _ in range(5):
        dist.isend(torch.ones(300_000), after)
    dist.barrier()


def test_dropped_works_harm_nobody(ranks):
    ranks(3, WEFT_TESTS="backend").run(on_weft, dropped)


def any_source(messages, seed):
    """Every rank sends to all others while it receives from any; sizes up to beyond the ring."""
    rank, world = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 9, (messages,), generator=random) ** 6 + 1  # up to 2 MB
    works = []
    mine = torch.Generator().manual_seed(seed + 1 + rank)
    for step in range(messages):
        size = int(sizes[step])
        for peer in range(world):
            if peer != rank:
                sent = torch.full((size,), float(rank * messages + step))
                works.append(dist.isend(sent, peer, tag=step))
        if torch.rand((), generator=mine) < 0.3:
            time.sleep(0.002)
        seen = set()
        for _ in range(world - 1):
            got = torch.empty(size)
            source = dist.recv(got, tag=step)
            assert torch.equal(got, torch.full((size,), float(source * messages + step)))
            seen.add(source)
        assert seen == set(range(world)) - {rank}
    for work in works:
        work.wait()
    dist.barrier()


@pytest.mark.parametrize("world", [2, 4])
def test_from_any_rank_under_load(ranks, world):
    ranks(world, WEFT_TESTS="backend").run(on_weft, any_source, 40, world)


def two_threads(messages):
    """One thread receives what another one's progress may end: neither sleeps through it."""
    import threading

    rank, world = dist.get_rank(), dist.get_world_size()
    peer, took = 1 - rank, []

    def pass_on(tag):
        for step in range(messages):
            started = time.perf_counter()
            sent, got = torch.full((9,), float(step)), torch.empty(9)
            work = dist.isend(sent, peer, tag=tag)
            dist.recv(got, peer, tag=tag)
            work.wait()
            assert float(got[0]) == step
            took.append(time.perf_counter() - started)

    threads = [threading.Thread(target=pass_on, args=(tag,)) for tag in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dist.barrier()
    assert world == 2
    return sorted(took)[len(took) // 2]


def test_threads_wake_each_other(ranks):
    # A wake-up that is lost costs a slice of 50 ms.
    assert max(ranks(2, WEFT_TESTS="backend").run(on_weft, two_threads, 100)) < 0.02


def gone(how):
    """All that could send go away: who receives from any rank hears it, and need not wait."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    weft.all_reduce(torch.ones(1), group=dist.group.WORLD)
    if rank != 0:
        time.sleep(0.3)
        if how == "give up":
            weft.fabric.of(None).give_up(weft.Error("enough"))
            store.wait(["heard"], timedelta(seconds=30))  # before it leaves, too
        return None
    started = time.monotonic()
    try:
        dist.recv(torch.empty(3))
    except weft.PeerLost as error:
        return str(error), time.monotonic() - started
    finally:
        store.set("heard", "")
    return "nothing", 0.0


@pytest.mark.parametrize("how", ["leave", "give up"])
def test_when_all_senders_are_gone(fresh_ranks, how):
    said, seconds = fresh_ranks(3).run(on_weft, gone, how)[0]
    assert ("left the group" if how == "leave" else "gave up") in said
    assert "receive from any rank" in said
    assert seconds < 5
